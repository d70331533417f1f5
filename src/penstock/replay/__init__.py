"""Traces of requests, played through the production cache without an engine.

| module       | holds                                                                         |
|--------------|-------------------------------------------------------------------------------|
| `lines`      | lines of files, compressed files and pipes, and of the traces of `traces/`     |
| `trace`      | requests in these lines, read as a stream: four formats; recordings            |
| `simulation` | `Replay`: a cache machine, a clock and modelled copies, driven by a trace      |
| `report`     | what a replay found, as a value and as text                                    |
| `curve`      | what LRU finds in rooms of every size, from one pass                           |
| `plan`       | one trace with many sizes of tiers, policies and ways to write                 |
| `advice`     | what to take of them, and why                                                  |
| `page`       | the same as a page                                                             |

Nothing here has memory for KV: what a replay knows of a block is its key.

Public: nothing. `penstock replay` and `penstock plan` are the interface.
"""
