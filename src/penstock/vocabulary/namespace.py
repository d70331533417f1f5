"""The namespace of a key: everything but the tokens that decides what KV a prefix has.

Every field is content. How and where bytes lie (block size, layout, shards, ranks, storage
format) is the form of a copy and has no place here: the same content in another form must
keep its key.

The one rule that must not break: two namespaces that differ in any field encode to different
bytes. Each field is framed with its name and both lengths, so bytes cannot move from one
field to the next. `docs/keys.md` is the specification.
"""

from __future__ import annotations

import reprlib
import struct
from dataclasses import dataclass, fields
from functools import lru_cache

NAMESPACE_DOMAIN = b"penstock.namespace.v1"
"""Opens every encoding. A change to the fields or to the framing needs a new version here."""

KEPT = 1024
"""Of how many namespaces the encoding is kept, as every request needs it: tenants, adapters and KV
groups in use at a time."""
FIELD_BYTES_MAX = 4096
"""Long enough for any path, digest or serialised rotary setting; bounds what a key absorbs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a block's content depends on besides the tokens up to its end.

    Fields are compared as UTF-8 bytes, without Unicode normalisation. An empty field means
    "the model's own" or "none", as each field says; it is still part of the encoding.
    """

    model: str
    """Which model, for example `meta-llama/Llama-3.1-8B`. Never empty: it has no default that
    would be safe to share."""
    weights_version: str = "unknown"
    """Which weights, usually a digest of the checkpoint."""
    kv_dtype: str = "bfloat16"
    """The element type in which the KV is kept."""
    kv_scales: str = ""
    """A digest of the scales of quantised KV; empty when it has none."""
    rotary: str = ""
    """The rotary configuration where it is not the model's own, such as a scaling factor."""
    kv_group: str = ""
    """Which KV group of a model that has several; empty when it has one."""
    adapter: str = ""
    """The adapter (LoRA or other) that the KV was computed with; empty for none."""
    tenant: str = ""
    """Who may share this KV; empty when everybody may."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _encode_field(field.name, getattr(self, field.name))
        if not self.model:
            raise ValueError("namespace field model is empty; it must name the model")

    def encode(self) -> bytes:
        """The canonical bytes of this namespace: what the running hash starts from."""
        return _encode(self)


@lru_cache(maxsize=KEPT)
def _encode(namespace: Namespace) -> bytes:
    names = [field.name for field in fields(namespace)]
    parts = [frame(NAMESPACE_DOMAIN), struct.pack("<I", len(names))]
    for name in names:
        parts.append(frame(name.encode("utf-8")))
        parts.append(frame(_encode_field(name, getattr(namespace, name))))
    return b"".join(parts)


def frame(content: bytes) -> bytes:
    """`content` behind its length as a little-endian uint32, so that nothing can shift."""
    return struct.pack("<I", len(content)) + content


def _encode_field(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return _encode_text(name, value)
    raise ValueError(f"namespace field {name} is {reprlib.repr(value)}; it must be a str")


def _encode_text(name: str, text: str) -> bytes:
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise ValueError(f"namespace field {name} has no UTF-8 encoding: {problem}") from None
    if len(encoded) > FIELD_BYTES_MAX:
        raise ValueError(
            f"namespace field {name} is {len(encoded)} bytes long; at most {FIELD_BYTES_MAX} fit"
        )
    return encoded
