"""How large everything is that `penstock bench engine` does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.bench.engine_model import EIGHT_B

if TYPE_CHECKING:
    from penstock.engine.architecture import Architecture

PARTS = ("chats", "decode", "hits", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """Conversations that outgrow the device ten times."""

    conversations: int = 100
    turns: int = 3
    first_tokens: int = 800
    question_tokens: int = 72
    answer_tokens: int = 24
    concurrent: int = 9

    @property
    def tokens(self) -> int:
        """Of one conversation, at its end."""
        more = (self.turns - 1) * (self.question_tokens + self.answer_tokens)
        return self.first_tokens + more + self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Answers to prompts that nobody has seen."""

    requests: int = 64
    prompt_tokens: int = 512
    answer_tokens: int = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPlan:
    """Prompts with a long prefix."""

    tokens: int = 32_768
    question_tokens: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPlan:
    """Answers that go on beside such prompts."""

    requests: int = 64
    context_tokens: int = 4096
    answer_tokens: int = 1600
    window_steps: int = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """All of it: by default, for an H200."""

    architecture: Architecture = EIGHT_B
    device: str = "cuda"
    dtype: str = "bfloat16"
    block_tokens: int = 64
    step_tokens: int = 4096
    step_requests: int = 64
    rounds: int = 3
    hit_rounds: int = 5
    graphs: bool = True
    load_gate: str = "measured"
    parts: tuple[str, ...] = PARTS
    chats: ChatPlan = field(default_factory=ChatPlan)
    decode: DecodePlan = field(default_factory=DecodePlan)
    hits: HitPlan = field(default_factory=HitPlan)
    latency: LatencyPlan = field(default_factory=LatencyPlan)

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"parts are {', '.join(self.parts)}, must be of {', '.join(PARTS)}")

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one request."""
        return -(-tokens // self.block_tokens)

    @property
    def chat_blocks(self) -> int:
        """All conversations, and a tenth of that is what the device has."""
        return self.chats.conversations * self.blocks_of(self.chats.tokens)

    @property
    def prefix_blocks(self) -> int:
        """One long prompt with its question and a token."""
        return self.blocks_of(self.hits.tokens + self.hits.question_tokens + 1)

    @property
    def decoding_blocks(self) -> int:
        """All answers to new prompts."""
        longest = self.decode.prompt_tokens + self.decode.answer_tokens
        return self.decode.requests * self.blocks_of(longest)

    @property
    def running_blocks(self) -> int:
        """All answers that go on beside arriving prefixes, or those to new prompts."""
        if "latency" not in self.parts:
            return self.decoding_blocks
        longest = self.latency.context_tokens + self.latency.answer_tokens
        return max(self.latency.requests * self.blocks_of(longest), self.decoding_blocks)
