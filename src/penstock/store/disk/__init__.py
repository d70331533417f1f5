"""The tier on a disk: blocks in segments of a folder, found again after any end.

Public: `tier.DiskTier`, and `inspect` for the command `penstock store`.
"""
