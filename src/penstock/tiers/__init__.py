"""Where blocks lie: slots and addresses, no policy.

Public:

- `base`: what a tier does, as protocols
- `arrays.ArrayTier`, `tensors.TensorTier`: the engine's own KV
- `host.MemoryTier`: memory of this process
- `host.HostTier`, `host.slots_in`, `host.slot_bytes`, `arena.Arena`: shared,
  pinned host memory
"""
