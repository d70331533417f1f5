"""What a host tier costs an engine: its own thread in every step, and CPU time while it waits.

What copies cost beside decode loops on a GPU, by who drives them, was measured once: the figures
are in docs/measurements/interference.csv, and decisions 6 and 7 rest on them.
"""
