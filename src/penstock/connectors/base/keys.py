"""From an engine's request to the keys of its blocks, and KV events with the engine's own hashes.

The attribute names of a request are vLLM's; another engine's connector wraps its requests. Where an
engine hands over requests, its own block hashes are not used: some of vLLM's hash functions are
seeded at random in every process, and none covers weights or dtype. A key here is made from the
request's tokens, its adapter, its salt and its media, each in a field of its own.

An engine that hands over nothing but hashes (SGLang) must hash tokens, adapter and salt with a
cryptographic hash. `PageKeys` adds what such a hash does not name: model, weights, dtype, rank.

The one rule: a token that is not known yet is not hashed. Under asynchronous scheduling an engine
counts tokens as computed before it knows them.

Layers that draft tokens (EAGLE, MTP) compute the KV of a token from the tokens behind it as well.
Where a block has such layers, its key names those tokens too, and is there when they are known.

A router knows blocks by the engine's hashes, from the events of the engine's device cache. Events
from here carry the same hashes and the same description of each block, with the medium that it
came to or left: host memory, a disk, a shared store. Penstock's own keys never leave the process.

A block is announced when a request has described it. What lies on a disk since an earlier life, or
was stored by another engine, is announced when the first request that it is loaded for comes.
"""

from __future__ import annotations

import hashlib
import os
import reprlib
import secrets
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.cache.tier import ANY_TENANT
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored
from penstock.vocabulary.hints import HINT_FIELDS, NO_HINTS, RetentionHints, read_hints
from penstock.vocabulary.keys import ITEM_KIND_BYTES_MAX, KEY_BYTES, Item, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.config import Config
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.vocabulary.keys import Key, KeyChain


NAME_BYTES_MAX = 256
"""A salt or an adapter with a longer name goes by its digest: a client chooses salts, and a
namespace field is bounded."""
CHAINS_KEPT = 256
"""Salts and adapters whose first key state is kept; a client may choose a new salt each time."""
PARAMETER = "penstock"
"""The key of a request's `kv_transfer_params` that is meant for this connector."""
SWITCHES = ("load", "save")
"""The keys of its value, where that is not just true or false; hints are others."""
HANDOFF_KEYS = ("handoff", "address")
"""Further keys of it: which prompt of which engine, where prompts are handed over."""
PAGES_DOMAIN = b"penstock.pages.v1"
"""Opens what is hashed for a key that is made from an engine's hash."""
SHOWN_CHARACTERS = 60
"""How much of a client's value a log line shows."""


class MediaPosition(Protocol):
    """Where a media item stands among the tokens."""

    offset: int
    length: int


class MediaItem(Protocol):
    """An image or another media item in a request."""

    modality: str
    identifier: str
    mm_position: MediaPosition


class LoraAdapter(Protocol):
    """A LoRA adapter of a request."""

    lora_name: str
    lora_path: str
    lora_int_id: int


class EngineRequest(Protocol):
    """What is read of an engine's request; the names are vLLM's."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    cache_salt: str | None
    skip_reading_prefix_cache: bool
    resumable: bool
    kv_transfer_params: object
    """Usually a dictionary or `None`; vLLM does not check every entry point."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Every token that is known, of the prompt and the answer."""
        ...

    @property
    def lora_request(self) -> LoraAdapter | None:
        """The adapter it runs with."""
        ...

    @property
    def mm_features(self) -> Sequence[MediaItem]:
        """The media in it."""
        ...

    @property
    def prompt_embeds(self) -> object | None:
        """What stands in place of tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Whether a request may be loaded and saved."""

    load: bool
    save: bool
    hints: RetentionHints = NO_HINTS
    error: str = ""
    """What is wrong with the request's parameters; such a request is neither loaded nor saved."""


def read_options(request: EngineRequest) -> RequestOptions:
    """Whether a request may be loaded from and saved to the tiers below the device.

    Prompt embeddings have no tokens to make keys from. A session that takes further input
    may change tokens that were hashed. Neither is loaded or saved, nor is a request with invalid
    parameters: a client that tried to opt out must not be saved.
    """
    options = _asked_for(request.kv_transfer_params)
    if options.error or request.prompt_embeds is not None or request.resumable:
        return RequestOptions(load=False, save=False, error=options.error)
    return replace(options, load=options.load and not request.skip_reading_prefix_cache)


def _asked_for(parameters: object) -> RequestOptions:
    """Reads `kv_transfer_params`; keys of other connectors are ignored."""
    everything = RequestOptions(load=True, save=True)
    if parameters is None:
        return everything
    if not isinstance(parameters, dict):
        return _wrong("", parameters, f'an object such as {{"{PARAMETER}": false}}')
    for key in parameters:
        # `Penstock`, `penstock.save` or a bare `save`: meant for us, but in the wrong place.
        near = str(key).strip().casefold()
        if key != PARAMETER and (near.startswith(PARAMETER) or near in SWITCHES):
            return _wrong(f"[{_short(key)}]", parameters[key], f'under the key "{PARAMETER}"')
    asked = parameters.get(PARAMETER, True)
    if isinstance(asked, bool):
        return RequestOptions(load=asked, save=asked)
    if not isinstance(asked, dict):
        return _wrong(f".{PARAMETER}", asked, "true, false, or an object of load and save")
    return _switched(asked)


def _switched(asked: Mapping[object, object]) -> RequestOptions:
    switches: dict[str, bool] = {}
    hints: dict[str, object] = {}
    for key, value in asked.items():
        if key in HANDOFF_KEYS:
            if not isinstance(value, str):
                return _wrong(f".{PARAMETER}.{key}", value, "a text, as an engine gave it")
        elif key in HINT_FIELDS:
            hints[str(key)] = value
        elif key not in SWITCHES:
            known = ", ".join(map(repr, (*SWITCHES, *HINT_FIELDS)))
            return _wrong(f".{PARAMETER}[{_short(key)}]", value, f"left out, or one of {known}")
        elif not isinstance(value, bool):
            return _wrong(f".{PARAMETER}.{key}", value, "true or false")
        else:
            switches[str(key)] = value
    load, save = switches.get("load", True), switches.get("save", True)
    try:
        return RequestOptions(load=load, save=save, hints=read_hints(hints, PARAMETER))
    except ValueError as error:
        return RequestOptions(load=False, save=False, error=f"kv_transfer_params.{error}")


def _wrong(where: str, value: object, right: str) -> RequestOptions:
    wrong = f"kv_transfer_params{where} is {_short(value)}, must be {right}"
    return RequestOptions(load=False, save=False, error=wrong)


def _short(value: object) -> str:
    """A client's value for a log line: one short line."""
    # `reprlib` bounds the work as well: a client may send a megabyte, or nest it deeply.
    shown = reprlib.repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Layers that draft tokens, whose KV lies in the blocks of the model."""

    name: str
    """What they are: others have other KV."""
    ahead: int
    """How many tokens behind a token its KV in these layers depends on."""


class KeyChains:
    """Empty key chains by salt and adapter: most requests share both with the one before."""

    def __init__(self, config: Config, *, drafts: Drafts | None = None, since: str = "") -> None:
        """Chains for one model."""
        if since:
            version = f"unknown since {since}"
            config = replace(config, model=replace(config.model, weights_version=version))
        self._config = config
        self._drafts = _named("drafts", drafts.name) if drafts is not None else ""
        self.ahead = drafts.ahead if drafts is not None else 0
        """How many tokens behind a block its key names."""
        outlives = config.persists and any(tier.stored for tier in config.cache.tiers)
        self._files = AdapterFiles() if outlives else None
        self._empty: dict[tuple[str, str], KeyChain] = {}

    def begin(self, request: EngineRequest) -> KeyChain:
        """An empty chain for the salt and the adapter of a request."""
        name = _named("salt", request.cache_salt or ""), self._adapter(request.lora_request)
        empty = self._empty.get(name)
        if empty is None:
            while len(self._empty) >= CHAINS_KEPT:
                del self._empty[next(iter(self._empty))]
            tenant, adapter = name
            empty = self._empty[name] = self._config.key_chain(
                tenant=tenant, adapter=adapter, kv_group=self._drafts
            )
        return empty.fork()

    def _adapter(self, adapter: LoraAdapter | None) -> str:
        if adapter is None:
            return ""
        # The path as well: a name may be given to another adapter later.
        name = f"{len(adapter.lora_name)}:{adapter.lora_name}:{adapter.lora_path}"
        if self._files is not None:
            name = f"{self._files.version(adapter.lora_path)}:{name}"
        return _named("lora", name)


class PageKeys:
    """Keys of blocks that an engine names by hashes of all tokens up to their end."""

    def __init__(self, config: Config, *, part: str = "", since: str = "") -> None:
        """Keys for one model.

        Args:
            config: It names the model, its weights and its dtype.
            part: What else they depend on, such as the rank.
            since: Set where weights may have changed: what was saved before is not found again.
        """
        model = config.model
        if since:
            model = replace(model, weights_version=f"unknown since {since}")
        namespace = replace(config, model=model).namespace(kv_group=part)
        self._start = hashlib.sha256(frame(PAGES_DOMAIN) + frame(namespace.encode()))

    def of(self, hashes: Iterable[str]) -> list[Key]:
        """The keys of the blocks with these hashes, which are hexadecimal digests."""
        keys = []
        for each in hashes:
            named = self._start.copy()
            named.update(bytes.fromhex(each))
            keys.append(named.digest()[:KEY_BYTES])
        return keys


class AdapterFiles:
    """Which version of an adapter lies at its path, where blocks outlive the process.

    A later engine may find another adapter under the same name and path. The files are looked at
    when the adapter is first used: names, sizes and times of change. Of an adapter whose files are
    not in a folder here nothing is known, so its blocks are found in this process only.
    """

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}

    def version(self, path: str) -> str:
        """A digest that changes with the files at a path."""
        found = self._versions.get(path)
        if found is None:
            while len(self._versions) >= CHAINS_KEPT:
                del self._versions[next(iter(self._versions))]
            found = self._versions[path] = _version_of_files(path) or secrets.token_hex(16)
        return found


def _version_of_files(path: str) -> str:
    """A digest of the files in a folder; empty if there are none, or they cannot be read."""
    try:
        with os.scandir(path) as entries:
            files = sorted((each.name, each.stat()) for each in entries if each.is_file())
    except (OSError, ValueError):
        return ""
    if not files:
        return ""
    said = [f"{name!r} {status.st_size} {status.st_mtime_ns}" for name, status in files]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


class RequestKeys:
    """The keys of one request's blocks, made as its tokens become known."""

    def __init__(self, chains: KeyChains, request: EngineRequest) -> None:
        self._request = request
        self._chain = chains.begin(request)
        self._ahead = chains.ahead
        self._items = tuple(sorted(map(_item, request.mm_features), key=lambda it: it.position))

    @property
    def stale(self) -> bool:
        """Whether the request has fewer tokens than were hashed: then its tokens have changed."""
        return self._request.num_tokens < self._chain.token_count

    @property
    def token_count(self) -> int:
        """How many leading tokens may be in keys by now."""
        return max(0, self._request.num_tokens - self._ahead)

    def upto(self, block_count: int) -> list[Key]:
        """The keys of the leading blocks, at most this many, all of whose tokens are known.

        The list is the chain's own, and may be longer: read it, do not change it.
        """
        chain = self._chain
        if len(chain.keys) < block_count and chain.token_count < self.token_count:
            first, end = chain.token_count, self.token_count
            items = [item for item in self._items if first <= item.position < end]
            if self._ahead:
                items = sorted([*items, *self._behind(first, end)], key=lambda it: it.position)
            chain.extend(self._request.all_token_ids[first:end], items)
        return chain.keys

    def _behind(self, first: int, end: int) -> Iterator[Item]:
        """For each block that ends in these tokens what stands behind it, as an item in it."""
        size = self._chain.block_tokens
        for place in range(first // size * size + size, end + 1, size):
            behind = range(place, place + self._ahead)
            tokens = array("I", self._request.all_token_ids[place : behind.stop])
            media = (item.encode() for item in self._items if item.position in behind)
            digest = hashlib.sha256(b"".join([tokens.tobytes(), *media])).digest()
            yield Item(position=place - 1, kind="behind", digest=digest, length=0)


def tenant_of(request: EngineRequest, known: Mapping[str, float]) -> str:
    """The tenant whose quota a request's blocks count against, and who has what its hints raise.

    That is its salt, where a quota names it or is for everybody; others count together.
    """
    salt = request.cache_salt or ""
    if salt in known:
        return salt
    return _named("salt", salt) if ANY_TENANT in known else ""


def _item(medium: MediaItem) -> Item:
    return Item(
        position=medium.mm_position.offset,
        kind=_ascii(medium.modality),
        digest=hashlib.sha256(medium.identifier.encode("utf-8", "surrogatepass")).digest(),
        length=medium.mm_position.length,
    )


def _ascii(kind: str) -> str:
    plain = kind.encode("ascii", "backslashreplace").decode("ascii")
    return plain[:ITEM_KIND_BYTES_MAX] or "medium"


def _named(domain: str, name: str) -> str:
    """A namespace field: the kind of name, and the name or, if that is long, its digest."""
    if not name:
        return ""
    raw = name.encode("utf-8", "surrogatepass")
    if len(raw) <= NAME_BYTES_MAX and _is_plain(raw):
        return f"{domain}:{name}"
    return f"{domain}-sha256:{hashlib.sha256(raw).hexdigest()}"


def _is_plain(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


if TYPE_CHECKING:
    Describe = Callable[[EngineRequest, int], "AnnouncedBlock"]

HELD_MAX = 1 << 20
"""Blocks that are remembered, about 440 bytes each. Beyond it, blocks of host memory take the
places of those that lie below it only; further ones are not announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedBlock:
    """A block as a router knows it."""

    hash: bytes
    parent: bytes | None
    tokens: array[int]
    """Four bytes each: they are kept for as long as the block is."""
    adapter: str | None = None
    adapter_id: int | None = None
    extra_keys: tuple[object, ...] | None = None
    """What beside tokens is in the hash, as the engine keeps it."""
    session: str | None = None
    """The session of the request that saved it."""


@dataclass(frozen=True, slots=True)
class Medium:
    """Where a block lies, in the engine's words for routers. Tiers of equal media are one place."""

    name: str
    locality: str
    """Whether the engine has it for itself, or other engines reach it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """A block is now in a medium."""

    block: AnnouncedBlock
    medium: Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedEvent:
    """Blocks are no longer in a medium."""

    hashes: list[bytes]
    medium: Medium


@dataclass(slots=True)
class _Entry:
    """A block that lies in some tiers."""

    block: AnnouncedBlock | None
    """`None`: no request has described it yet."""
    tiers: int = 0
    """A bit for each tier that has it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tier whose blocks are announced."""

    bit: int
    medium: Medium
    same_medium: int
    """The bits of all tiers that routers know as the same medium."""


class EventAnnouncer:
    """Turns events of the tiers into events that the engine publishes."""

    def __init__(
        self, media: Mapping[str, Medium], *, describe: Describe, held_max: int = HELD_MAX
    ) -> None:
        """Announces nothing yet."""
        bits = {tier: 1 << number for number, tier in enumerate(media)}
        same = {
            medium: sum(bits[tier] for tier in media if media[tier] == medium)
            for medium in media.values()
        }
        self._places = {
            tier: _Place(bits[tier], medium, same[medium]) for tier, medium in media.items()
        }
        self._same_medium = same
        self._hub = 1
        self._describe = describe
        self._held_max = held_max
        self._expected: dict[Key, AnnouncedBlock] = {}
        self._entries: dict[Key, _Entry] = {}
        self._below: dict[Key, None] = {}
        """The blocks that are not in host memory, those that left it first at the front."""
        self._sequence = 0
        """The number of the last event that was taken in."""
        self._events: list[StoredEvent | RemovedEvent] = []

    def expect(self, request: EngineRequest, blocks: Iterable[tuple[int, Key]]) -> None:
        """These blocks of a request, by number and key, are being saved."""
        for number, key in blocks:
            entry = self._entries.get(key)
            if entry is None:
                if self._make_room():
                    self._expected[key] = self._describe(request, number)
            else:
                self._name(entry, request, number)

    def describe(self, request: EngineRequest, blocks: Iterable[tuple[int, Key]]) -> None:
        """A request has these blocks: announces those in the tiers that nobody has described."""
        for number, key in blocks:
            entry = self._entries.get(key)
            if entry is not None:
                self._name(entry, request, number)

    def forget(self, keys: Iterable[Key]) -> None:
        """The saves of these blocks have ended: those not stored by now never will be."""
        for key in keys:
            self._expected.pop(key, None)

    def note(self, events: Iterable[KvEvent], snapshot: Callable[[], Snapshot]) -> None:
        """Takes in what happened in the tiers since the last call."""
        for event in events:
            if event.sequence <= self._sequence:
                continue  # The snapshot has it.
            if event.sequence != self._sequence + 1:
                self._catch_up(snapshot())
                continue
            self._sequence = event.sequence
            match event:
                case BlocksStored() if event.tier in self._places:
                    self._note_stored(self._places[event.tier], event.keys)
                case BlocksRemoved() if event.tier in self._places:
                    self._note_removed(self._places[event.tier], event.keys)
                case AllCleared():
                    self._clear()
                case _:
                    pass

    def take(self) -> list[StoredEvent | RemovedEvent]:
        """The events to publish."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- what the tiers have

    def _note_stored(self, place: _Place, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._entries.get(key) or self._add(key)
            if entry is None:
                continue
            if place.bit == self._hub:
                self._expected.pop(key, None)
                self._below.pop(key, None)
            elif not entry.tiers:
                self._below[key] = None
            before, entry.tiers = entry.tiers, entry.tiers | place.bit
            if entry.block is not None and not before & place.same_medium:
                self._events.append(StoredEvent(block=entry.block, medium=place.medium))

    def _add(self, key: Key) -> _Entry | None:
        """An entry for a block that was nowhere; what nobody has described displaces nothing."""
        block = self._expected.get(key)
        if block is None and self._full:
            return None
        entry = self._entries[key] = _Entry(block)
        return entry

    def _note_removed(self, place: _Place, keys: Iterable[Key]) -> None:
        hashes: list[bytes] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.tiers & place.bit:
                continue
            entry.tiers &= ~place.bit
            if not entry.tiers:
                self._drop(key)
            elif place.bit == self._hub:
                self._below[key] = None
            if entry.block is not None and not entry.tiers & place.same_medium:
                hashes.append(entry.block.hash)
        if hashes:
            self._events.append(RemovedEvent(hashes=hashes, medium=place.medium))

    def _clear(self) -> None:
        # The engine's own "all cleared" event would cover its device cache as well.
        for place in self._places.values():
            self._note_removed(place, [*self._entries])

    def _catch_up(self, snapshot: Snapshot) -> None:
        """Events were dropped: announces what is different from what was announced."""
        self._sequence = snapshot.sequence
        there = {tier: dict(snapshot.blocks.get(tier, [])) for tier in self._places}
        # First what has come: what went down is then not forgotten where it was.
        for tier, place in self._places.items():
            self._note_stored(place, there[tier])
        for tier, place in self._places.items():
            self._note_removed(place, [key for key in self._entries if key not in there[tier]])

    # ---------------------------------------------------------------- the bound

    @property
    def _full(self) -> bool:
        return len(self._expected) + len(self._entries) >= self._held_max

    def _make_room(self) -> bool:
        """Whether one more can be remembered: instead of one that is not in host memory."""
        if self._full and self._below:
            key = next(iter(self._below))
            entry = self._entries[key]
            self._drop(key)
            if entry.block is not None:
                self._events += [
                    RemovedEvent(hashes=[entry.block.hash], medium=medium)
                    for medium, tiers in self._same_medium.items()
                    if entry.tiers & tiers
                ]
        return not self._full

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        self._below.pop(key, None)

    def _name(self, entry: _Entry, request: EngineRequest, number: int) -> None:
        """Announces a block in all media that have it, unless it was."""
        if entry.block is None:
            block = entry.block = self._describe(request, number)
            self._events += [
                StoredEvent(block=block, medium=medium)
                for medium, tiers in self._same_medium.items()
                if entry.tiers & tiers
            ]
