"""What moving blocks costs an engine's steps, by who drives the copies.

| module            | holds                                                                   |
|-------------------|-------------------------------------------------------------------------|
| `shares`          | the arithmetic: windows of steps, shares kept, which rows are compared   |
| `windows`         | runs a loop for a while beside a side, step by step                      |
| `traffic`         | copies through a mover that never run out, counted as they end           |
| `sides`           | who drives them: the engine at its steps, a thread, another process      |
| `shapes`, `decoding` | the decode loops, in plain torch                                      |
| `pool`            | the blocks that are moved, and proof that the right bytes arrived        |
| `second_process`  | the copies driven by a process of their own over CUDA IPC                |
| `on_cuda`         | the whole measurement on a GPU                                           |
| `engine_time`, `idle_time`, `on_cpu` | what the tier costs on a machine without one          |

The one rule: all sides move the same blocks by the same kernels; only the driving differs.
"""
