"""Data structures for the block metadata of one engine: index, slots, eviction, operations.

Public: `settings`, whose values describe a cache, and `eviction`. Only the machine changes what is
in the other modules.
"""
