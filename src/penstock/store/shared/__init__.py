"""The tier in a store that many engines share, above any client of such a store.

Public: `tier.SharedTier`.
"""
