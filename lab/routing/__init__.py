"""Up to a thousand simulated engines behind the router of `penstock serve`.

| module     | holds                                                                     |
|------------|---------------------------------------------------------------------------|
| `clock`    | an event loop whose time passes only when nothing is left to do            |
| `traffic`  | requests: conversations of the shipped traces, or generated ones           |
| `engine`   | an engine as rates, with a bounded cache of real keys, and its connection   |
| `policies` | the router of `penstock serve`, and others to compare it with              |
| `faults`   | what happens to the machines                                               |
| `world`    | all of it, from one seed, and what was measured                            |
| `report`   | runs as a table and as a document                                          |

Router, links, pairs, keys, KV events, messages and the books of peers are those of the product. Not
simulated: HTTP, sockets, and the steps of an engine. `lab.worlds.fleet` is something else: the
engines of a handoff.
"""
