"""Engines that read blocks out of each other's host memory, through their store processes.

Public: `tier.PeerTier`, opened from its settings by `tier.open_peers`.
"""
