"""Values: ids, keys, layout and form, extents, checksums. Frozen, no more than arithmetic."""
