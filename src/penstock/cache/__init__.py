"""Data structures for the block metadata of one engine: index, slots, eviction, operations.

Only the machine changes them.
"""
