"""What a connector needs and no engine's code: a second engine is an adapter beside `vllm`.

| module          | holds                                                                  |
|-----------------|------------------------------------------------------------------------|
| `engine`        | the engine as values, and its KV tensors as a device tier              |
| `keys`          | a request's options, and the keys of its blocks                        |
| `scheduler`     | the scheduler's side: lookups, loads, saves; the plan of a step        |
| `pins`          | device blocks that are kept from reuse while a save reads them         |
| `store_prefetch` | blocks that come up from a disk while their request waits             |
| `worker`        | a worker's side: executes plans, reports what failed                   |
| `layerwise`     | loads that a step computes on while they arrive                        |
| `shared_arenas` | one host tier for all ranks with equal bytes                           |
| `statistics`    | counters, gauges, times, rate-limited warnings, prefill speed          |
| `events`        | KV events with the engine's own block hashes                           |

An adapter opens a `WorkerConnector` in each worker and a `SchedulerConnector` over all of them, and
translates the engine's calls into theirs. Requests and block pools are described by the protocols
`EngineRequest` and `BlockPool`.

Public: `scheduler.SchedulerConnector`, `worker.WorkerConnector` and the values that they
take, in `engine`, `keys` and `statistics`.
"""
