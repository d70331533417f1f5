"""The prefill → decode protocol as four state machines without I/O or clock, after `PROTOCOL.md`.

| when                                  | prefill engine           | decode engine              |
|---------------------------------------|--------------------------|----------------------------|
| a request comes                       | `submit`                 | `submit`                   |
| a rank is about to compute it         | `admit`, on each rank    |                            |
| a layer, or a chunk, is computed      | `progress`, on each rank |                            |
| the first token is sampled            | `first_token`            |                            |
| the client is gone                    | `cancel`                 | `cancel`                   |
| its room is needed for others         |                          | `withdraw`                 |
| `HandoffEnded`, one for each `submit` | its blocks are not read  | its slots are the          |
|                                       | any more                 | request's, or free         |
| a rank's process is seen dead         | `suspect(rank)`          | `suspect(rank)`            |
| a peer is silent                      | `suspect(peer)`          | `suspect(peer)`            |

| modules                                    | hold                                              |
|--------------------------------------------|---------------------------------------------------|
| `identity`, `messages`, `effects`, `grid`  | values: who, what is sent, what is done, parts    |
| `states`, `settings`                       | states with their tables; times and bounds        |
| `party`                                    | what the machines share: peers, timers, silence   |
| `prefill_scheduler`, `prefill_rank`        | the machines of the prefill engine                |
| `decode_scheduler`, `decode_rank`          | those of the decode engine                     |

Public, for those who drive the machines themselves: `prefill_scheduler.PrefillScheduler`,
`prefill_rank.PrefillRank`, `decode_scheduler.DecodeScheduler`, `decode_rank.DecodeRank`, and what
they take and return in `messages`, `effects`, `states`, `settings`, `grid` and `identity`.
"""
