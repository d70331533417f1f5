"""A served system that runs for hours while things break, and is looked at in between.

    world     Redis, and `penstock serve` with two prefill and two decode instances above a disk
    clients   ask prompts whose answers are known, and note what no client should get
    faults    draws from a seed what breaks next, and mends what does not mend itself
    meter     what the processes have taken, and whether that has grown
    run       rounds: load and faults, then calm, then a look

The one rule: a fault may cost an answer; it never changes one, and nothing of it stays behind.
"""
