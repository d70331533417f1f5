"""The production driver of handoffs: the four machines over channels, remote writes and memory.

| module             | holds                                                                 |
|--------------------|-----------------------------------------------------------------------|
| `directory`        | who takes part: names, addresses, forms; the plan that follows of them |
| `envelope`         | a message of the protocol with what its driver attaches to it          |
| `lines`, `switchboard` | control channels to the other parties: ZeroMQ, and in-process      |
| `parts`            | which bytes a part consists of, and how they are packed and put away   |
| `driving`          | what all four drivers have in common: `step`, `wait`, `close`          |
| `schedulers`, `prefill_rank`, `decode_rank` | the four drivers                              |
| `progress`         | what a device has computed, by events                                  |

The one rule: a step does bounded work and never waits; `wait` is one poll with a deadline.
"""
