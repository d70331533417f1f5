"""Plain data structures for the block metadata of one engine: index, pools, eviction."""
