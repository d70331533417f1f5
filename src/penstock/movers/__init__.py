"""How bytes travel between two media, no policy.

Public: `base`, which says what a mover does; `memcpy.MemcpyMover`; `table.mover_between`.
"""
