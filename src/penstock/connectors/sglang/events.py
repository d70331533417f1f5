"""KV events of the tiers below SGLang's radix cache, among those that SGLang publishes of its own.

With `--kv-events-config` SGLang publishes which pages came to its device and left it. A hook in its
plugin registry adds what the tiers below have: with the same hashes, parents and tokens, and as
medium `CPU_PINNED`, `DISK` or `EXTERNAL`, as SGLang calls host memory, a disk and a shared store.

What a page holds is learned from SGLang's own event: all that is saved was on the device. Pages of
requests with a salt or an adapter have other hashes there, and are not announced.

The one rule: a page is announced with what SGLang itself has said of it, or not at all.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.utils import hash_str_to_int64
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from penstock.config.values import SHARED_KINDS
from penstock.connectors.base.keys import AnnouncedBlock, EventAnnouncer, Medium, StoredEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.config import Config
    from penstock.connectors.base.keys import RemovedEvent
    from penstock.connectors.base.pages import PageTiers
    from penstock.vocabulary.keys import Key

TAKES_EVENTS = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events"
KEPT = 1 << 16
"""Pages that SGLang has announced and that are not saved yet, and saved ones that it has not
announced: some hundred bytes each."""
HELD_MAX = 1 << 18
"""Pages below the device that are remembered, about 440 bytes each."""
HASH_BYTES = 8

ValueT = TypeVar("ValueT")


class PageEvents:
    """The events of one rank, which publishes for all: ranks have the same pages."""

    def __init__(self, config: Config, tiers: PageTiers) -> None:
        """Has SGLang ask here whenever it publishes."""
        self._tiers = tiers
        self._announcer = EventAnnouncer(_media_of(config), describe=_described, held_max=HELD_MAX)
        self._keys: OrderedDict[bytes, Key] = OrderedDict()
        """Of pages that were saved or loaded, by SGLang's hash, until SGLang announces them."""
        self._said: OrderedDict[bytes, AnnouncedBlock] = OrderedDict()
        """What SGLang has announced."""
        HookRegistry.register(TAKES_EVENTS, self._take, HookType.AROUND)
        HookRegistry.apply_hooks()

    def name(self, hashes: Sequence[str]) -> None:
        """These pages are being saved or loaded."""
        for page_hash, key in zip(hashes, self._tiers.keys_of(hashes), strict=True):
            name = _as_bytes(hash_str_to_int64(page_hash))
            said = self._said.get(name)
            if said is None:
                _keep(self._keys, name, key)
            else:
                self._expect(said, key)

    def _take(self, take: Callable[[Any], list[Any]], tree: Any) -> list[Any]:
        events = take(tree)
        for event in events:
            if isinstance(event, BlockStored) and event.medium == StorageMedium.GPU:
                self._learn(event)
        offload = self._tiers.offload
        self._announcer.note(offload.take_kv_events(), offload.kv_snapshot)
        return [*events, *map(_published, self._announcer.take())]

    def _learn(self, event: Any) -> None:
        """Remembers what SGLang says of pages that follow each other."""
        parent, size = event.parent_block_hash, event.block_size
        for number, page_hash in enumerate(event.block_hashes):
            name = _as_bytes(page_hash)
            block = AnnouncedBlock(
                hash=name,
                parent=None if parent is None else _as_bytes(parent),
                tokens=array("I", event.token_ids[number * size : (number + 1) * size]),
                session=event.session_id,
            )
            _keep(self._said, name, block)
            key = self._keys.pop(name, None)
            if key is not None:
                self._expect(block, key)
            parent = page_hash

    def _expect(self, block: AnnouncedBlock, key: Key) -> None:
        """A page that a tier has, or is getting: it stands for the request that described it."""
        page: Any = block
        self._announcer.expect(page, [(0, key)])


def _described(page: Any, _number: int) -> AnnouncedBlock:
    found: AnnouncedBlock = page
    return found


def _media_of(config: Config) -> dict[str, Medium]:
    """What SGLang calls each tier below the device, by its name; events have no locality."""
    return {
        tier.name: Medium(
            StorageMedium.EXTERNAL.value
            if kind.name in SHARED_KINDS
            else StorageMedium.DISK.value
            if tier.stored
            else StorageMedium.CPU.value,
            "",
        )
        for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True)
    }


def _published(event: StoredEvent | RemovedEvent) -> Any:
    if isinstance(event, StoredEvent):
        block = event.block
        return BlockStored(
            block_hashes=[_as_int(block.hash)],
            parent_block_hash=None if block.parent is None else _as_int(block.parent),
            token_ids=list(block.tokens),
            block_size=len(block.tokens),
            lora_id=None,
            medium=event.medium.name,
            session_id=block.session,
        )
    return BlockRemoved(block_hashes=list(map(_as_int, event.hashes)), medium=event.medium.name)


def _keep(kept: OrderedDict[bytes, ValueT], name: bytes, value: ValueT) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > KEPT:
        kept.popitem(last=False)


def _as_bytes(page_hash: int) -> bytes:
    return page_hash.to_bytes(HASH_BYTES, "little", signed=True)


def _as_int(page_hash: bytes) -> int:
    return int.from_bytes(page_hash, "little", signed=True)
