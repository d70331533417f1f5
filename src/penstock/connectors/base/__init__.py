"""What a connector needs and no engine's code: a second engine is an adapter beside `vllm`.

| module          | holds                                                                  |
|-----------------|------------------------------------------------------------------------|
| `engine`        | the engine as values, and its KV tensors as a device tier              |
| `keys`          | a request's options, and the keys of its blocks                        |
| `scheduler`     | the scheduler's side: lookups, loads, saves; the plan of a step        |
| `requests`      | requests, blocks pinned for saves, blocks that come up from a disk     |
| `worker`        | a worker's side: executes plans, reports what failed                   |
| `layerwise`     | loads that a step computes on while they arrive                        |
| `statistics`    | counters, gauges, times, rate-limited warnings, prefill speed          |
| `report`        | what became of the prompts of a script: hits, misses, bytes            |

An adapter opens a `WorkerConnector` in each worker and a `SchedulerConnector` over all of them, and
translates the engine's calls into theirs. Requests and block pools are described by the protocols
`EngineRequest` and `BlockPool`.

Public: `scheduler.SchedulerConnector`, `worker.WorkerConnector` and the values that they
take, in `engine`, `keys` and `statistics`.
"""
