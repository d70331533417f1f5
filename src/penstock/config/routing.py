"""The tables of `penstock serve` about who gets a request: our router, and news for other ones.

The defaults are stated here; `schema` has the ranges, and `docs/config.md` describes the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """`[routing]`: how the router chooses instances; weights are in cached blocks of a prompt."""

    cached_weight: float = 1.0
    """What a leading block of the prompt is worth that an instance has in any tier."""
    load_weight: float = 8.0
    """What each request under way counts against an instance: a long queue outweighs a hit."""
    computing_weight: float = 32.0
    """What counts against a decode instance while no prefill instance can compute for it."""
    failed_weight: float = 32.0
    """What counts against a prefill instance for each prompt that it failed to hand over lately."""
    failed_s: float = 10.0
    """How long such a failure counts."""
    equal_blocks: float = 1.0
    """Instances that differ by no more than this in worth get requests in turn. All conversations
    share a start, such as the first lines of a chat template, which would otherwise send all of
    them to one instance."""
    handoff_tokens_min: int = 0
    """A prompt of which decode has all but so many tokens, or fewer, is not started on a prefill
    instance; 0: a block."""
    attempts_max: int = 3
    """How many instances a request is sent to, one after the other, if they are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsTable:
    """`[events]`: where the server publishes KV events for routers that are not ours."""

    host: str = "127.0.0.1"
    port: int = 5557
    """Of the first instance; each further one has the next port. 0: any."""
    replay_port: int = 5657
    """The same for those who ask for what they missed."""
    topic: str = ""
    token_ids: bool = False
    """Whether events carry the tokens of blocks, which are what users wrote."""
    unencrypted: bool = False
    """Whether they may do so beyond this machine, where nothing protects them."""
    hashes: str = "integers"
    """`integers`: the last 64 bits of a key, as vLLM does by default; `bytes`: whole keys."""
    replay_batches: int = 10_000
    """Batches that can be asked for again; whoever missed more gets a snapshot."""
    queue_batches: int = 100_000
    """Batches that wait for a slow subscriber; it misses further ones."""

    def __post_init__(self) -> None:
        try:
            local = ip_address(self.host).is_loopback
        except ValueError:
            problem = f"is {self.host!r}, must be an IP address to listen on, such as '127.0.0.1'"
            raise ConfigError("events.host", problem) from None
        if self.port and self.port == self.replay_port:
            raise ConfigError(
                "events.replay_port", f"is {self.replay_port}, must be another one than events.port"
            )
        if self.token_ids and not local and not self.unencrypted:
            raise ConfigError(
                "events.token_ids",
                f"is true with events.host {self.host!r}, must be false, or events.unencrypted "
                "true: everybody who reaches the port could read what users wrote",
            )
