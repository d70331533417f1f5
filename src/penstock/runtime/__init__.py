"""The driver of a cache: it runs the machine, copies blocks, and talks to ranks.

Public: what `penstock` exports from `open`, `cache`, `offload`, `rank`, `messages`,
`copy_executor` and `status`.

`open` makes a `Cache` or an `Offload` over a
`Driver`, which reaches its ranks by `rank_links`; a `Rank` makes its copies by `copy_executor`.
"""
