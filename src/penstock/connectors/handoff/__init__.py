"""Prompts that one engine computes and another answers, inside an engine that has its own loop.

| module      | holds                                                               | thread       |
|-------------|---------------------------------------------------------------------|--------------|
| `requests`  | which requests are handed over; their blocks; what a step reports   | the engine's |
| `scheduler` | the scheduler's pairs; which prompts are offered, which are claimed | its own      |
| `rank`      | a rank's sides of these pairs; blocks of prompts, how far computed  | its own      |
| `messages`  | what engines say to each other, and schedulers to their ranks       |              |

An engine calls its connector in steps, and an idle engine makes none, but a handoff has timers and
peers all the time. So each process has a thread of its own for them: the engine's thread posts
calls to it, and collects what has ended.

Public: `requests.HandoffThread`, `rank.RankSides`, `scheduler.SchedulerHandoffs`,
`requests.HandoffRequests` and `requests.HandoffStep`.

The rule: a prompt's blocks are read while they are its request's own, or pinned, and a claim's
blocks stay with their request until its end was reported to the engine.
"""
