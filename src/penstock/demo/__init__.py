"""The demonstration behind `penstock demo`: a real model, served, asked, and checked.

| module      | holds                                                                  |
|-------------|------------------------------------------------------------------------|
| `chats`     | what is asked: conversations that share their system prompts             |
| `asking`    | one request over HTTP, and what was heard of it                         |
| `server`    | a `penstock serve` of its own, for as long as it is needed              |
| `clients`   | several clients that talk at the same time                              |
| `exactness` | every answer against a fresh computation                                |
| `playing`   | all of it, from the start to the verdict                                |
| `result`    | what came of it, as values                                              |
| `picture`   | the same as a timeline, for a browser                                   |
"""

from __future__ import annotations

from penstock.demo.result import Played
from penstock.demo.runner import Stage, play

__all__ = ["Played", "Stage", "play"]
