"""Questions about one document to a GGUF model, each by a process that has just begun.

    python examples/gguf.py MODEL.gguf [FOLDER]

FOLDER is where states are kept; without it, an empty one. Needs llama-cpp-python.
"""

from __future__ import annotations

import sys
import tempfile
import time

from llama_cpp import Llama

import penstock

CONFIG = """
version = 1
model.name = "gguf"
tiers = [
    {{ name = "host", kind = "host", gib = 0.01 }},
    {{ name = "disk", kind = "disk", path = "{folder}", gib = 2 }},
]
"""
DOCUMENT = "".join(f"Item {number} costs {number * 37 % 101} coins. " for number in range(12))
QUESTIONS = ("What does item 3 cost?", "What does item 7 cost?")


def ask(model: str, folder: str, question: str) -> None:
    """All that a script needs: it may end after this, and the next one finds the document."""
    llm = Llama(model, n_ctx=1024, verbose=False)
    cache = penstock.llama_cpp.open(llm, penstock.parse_config(CONFIG.format(folder=folder)))
    llm.set_cache(cache)
    began = time.perf_counter()
    said = llm.create_completion(DOCUMENT + question, max_tokens=8, temperature=0.0)
    took = time.perf_counter() - began
    print(f"{question} {said['choices'][0]['text'].strip()!r} ({took:.2f} s)")
    print(cache.report())


def main(given: list[str]) -> None:
    if not given:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as empty:
        for question in QUESTIONS:
            ask(given[0], given[1] if len(given) > 1 else empty, question)


if __name__ == "__main__":
    main(sys.argv[1:])
