"""The demonstration behind `penstock demo`: a toy engine, its clients, and what they play.

| module      | holds                                                                    |
|-------------|--------------------------------------------------------------------------|
| `toy_model` | a "model" whose KV can be computed anew from the tokens at any time       |
| `engine`    | a small engine on a managed cache, which verifies every byte it reads     |
| `chats`     | clients that talk in turns, drawn from a seed                             |
| `watching`  | eyes on tiers and KV events                                              |
| `acts`      | what is played, and what must come of it                                  |
| `result`    | what came of it, as values                                                |
"""

from __future__ import annotations

from lab.demo.acts import run_demo
from lab.demo.result import Demonstration

__all__ = ["Demonstration", "run_demo"]
