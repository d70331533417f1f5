"""A process that imports SGLang once and forks for every engine of the tests here.

    python fork_server.py

Four processes of an engine import SGLang, each for about ten CPU seconds, which is most of what the
start of an engine costs. Here they are forks of a process that has imported it: SGLang starts its
processes by `spawn`, here by `fork`. `test_serving.py` starts SGLang as a user does.

What it reads and answers, and its one rule, are in `fork_loop.py` of the tests of vLLM.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

multiprocessing.set_start_method("fork")
# SGLang would set it to "spawn".
multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]

import engine_run  # noqa: E402
import fork_loop  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402

# The registry imports every model when it is asked the first time.
ModelRegistry.get_supported_archs()


def run_engine(model: str, script: dict[str, Any]) -> None:
    engine_run.main(model, script)


if __name__ == "__main__":
    fork_loop.serve({"run_engine": run_engine})
