"""The examination behind `penstock doctor`: is this machine fit for a configuration?

| module   | holds                                                                            |
|----------|----------------------------------------------------------------------------------|
| `facts`  | what the machine says of itself, and short measurements of its disks and GPUs     |
| `checks` | one function for each check, from facts to findings, and the table of all of them |

Public: nothing. `penstock doctor` is the interface.
"""
