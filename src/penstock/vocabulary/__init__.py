"""Values: ids, keys, layout and form, checksums. Frozen, no more than arithmetic.

Public:

- `layout`, with `planes`: how the KV of a block lies in memory
- `form`, `reshard`: how KV of one geometry becomes that of another
- `keys`: the names of blocks and operations
- `checksums`: the sums of its bytes
"""
