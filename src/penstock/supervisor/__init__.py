"""A small process that starts, watches and restarts all others, and holds the arenas.

    engine ══ channel ══ supervisor ──┬── rank            `client.py` is the engine's side,
      ▲                      │        ├── rank            `loop.py` the supervisor's;
      └─────── pidfd ────────┘        └── store process   `child.py` begins each process

It imports neither torch nor NumPy and has one thread, so it starts within a moment, has little
to go wrong, and can start processes at any time; the engine, with its CUDA context and its
libraries' threads, cannot.

The one rule that must not break: nothing outlives the engine. Whoever of these dies, however,
the others end within their deadlines, and the kernel takes the memory back.
"""
