"""A small process that starts, watches and restarts all others, and holds the arenas.

    engine ══ channel ══ supervisor ──┬── rank            `client.py` is the engine's side,
      ▲                      │        ├── rank            `loop.py` the supervisor's;
      └─────── pidfd ────────┘        └── store process   `child.py` starts each process

It imports neither torch nor NumPy and has one thread, so it starts in about 60 ms, has little
to go wrong, and can start processes at any time. The engine cannot: it has a CUDA context, and
its libraries have threads.

Public: in the engine's process `client.Supervisor`, the specs and events of `messages`; in a
supervised process `descriptors.inherited_descriptor` and `descriptors.keeper`. Nothing is
imported here, to keep the process small.

The one rule that must not break: nothing outlives the engine. If any of these processes dies,
the others end within their deadlines, and the kernel frees the memory.
"""
