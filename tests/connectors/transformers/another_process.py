"""Another process with the same model and folder: it answers a prompt, and is killed.

Arguments: the folder of the checkpoint, that of the disk, and how many tokens the prompt has.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import penstock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.connectors.transformers.conftest import compare, config_with_disk, tokens_of

    torch.set_num_threads(1)
    checkpoint, disk, count = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    cache = penstock.transformers.open(model, config_with_disk(Path(disk), weights=""))
    found = compare(cache, model, tokens_of(int(count)))
    sys.stdout.write(f"{found.cached[0]} {found.right}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
