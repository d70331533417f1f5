"""Values: ids, keys, layout and form, checksums. Frozen, no more than arithmetic.

Public:

- `layout`, with `layers`, `planes` and `dtypes`: how the KV of a block lies in memory
- `form`, `reshard`, `narrowing`, `cell_span`: how KV of one geometry becomes that of another
- `keys`, `namespace`: the name of a block
- `checksums`, `packing`: its bytes
- `ids`: names that are numbers
"""
