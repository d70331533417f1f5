"""The store process: everything slower than host memory happens there.

It maps the host arenas of engines and moves blocks between them and the tiers below, such as a
disk. Engines reach it over a Unix socket; they get no thread and no file I/O of their own.

Public: nothing here. `penstock.open` and the `penstock store` command use it.
"""
