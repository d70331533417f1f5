"""The demonstration behind `penstock demo`: serves a model, asks it, and checks every answer.

| module      | holds                                                                  |
|-------------|------------------------------------------------------------------------|
| `chats`     | the questions: conversations that share system prompts                   |
| `clients`   | a `penstock serve`, and several clients that talk to it at the same time |
| `exactness` | the check of every answer against a fresh computation                    |
| `runner`    | the demonstration from start to verdict                                  |
| `result`    | the results as values                                                    |
| `page`      | the results as a page for a browser                                      |
"""

from __future__ import annotations

from penstock_serve.demo.result import Played
from penstock_serve.demo.runner import Stage, play

__all__ = ["Played", "Stage", "play"]
