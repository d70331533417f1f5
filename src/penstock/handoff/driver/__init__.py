"""The drivers of a handoff: the four machines over connections, remote writes and memory.

| module                                      | holds                                           |
|---------------------------------------------|-------------------------------------------------|
| `directory`                                 | the parties: names, addresses, forms; the plan  |
| `lines`                                     | connections: ZeroMQ, and within one process     |
| `party_driver`                              | what all four drivers share: `step`, `wait`     |
| `schedulers`, `prefill_rank`, `decode_rank` | the four drivers                                |
| `parts`, `device_parts`                     | which bytes a part has; packing and taking them |

The one rule: a step does bounded work and never waits; `wait` is one poll with a deadline.

Engines use `penstock.handoff`. Public, for those who join the parts themselves: `directory`,
`schedulers`, `prefill_rank`, `decode_rank`, `lines`, `parts`.
"""
