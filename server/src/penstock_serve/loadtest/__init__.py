"""The load generator behind `penstock load`: asks any server with OpenAI's API, and measures it.

| module      | holds                                                                        |
|-------------|------------------------------------------------------------------------------|
| `workloads` | what is asked: generated sessions, or the requests of a trace                |
| `exchange`  | one request, streamed and measured; what can go wrong with it                |
| `runner`    | all requests of a run: when each is sent, by how many clients                |
| `report`    | the result as a value, and the rows in which runs are compared               |

Public: nothing. `penstock load` and `penstock load-compare` are the interface.
"""
