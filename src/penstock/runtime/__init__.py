"""The driver of a cache: it runs the machine, copies blocks, and talks to ranks.

Engines use what `penstock` exports from here. `open` makes a `Cache` or an `Offload` over a
`Driver`, which reaches its ranks by `rank_links`; a `Rank` makes its copies by `copy_executor`.
"""
