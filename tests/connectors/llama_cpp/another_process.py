"""Another process with the same model and folder: it answers two prompts, and is killed.

Arguments: the model's file, and the folder of the disk.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.connectors.llama_cpp.test_answers import FIRST, close
    from tests.connectors.llama_cpp.tiny_models import (
        answer,
        config_in,
        load,
        prompt_of,
        with_cache,
    )

    model, disk = map(Path, sys.argv[1:])
    llm = with_cache(model, config_in(disk))
    found = answer(llm, FIRST)
    sys.stdout.write(
        f"{llm.cache.report().tokens_cached} {close(found, answer(load(model), FIRST))}\n"
    )
    answer(llm, prompt_of(200, seed=5))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
