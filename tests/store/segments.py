"""Segments as a disk tier writes them, made by the functions of the format alone."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.store.base import NO_KEY, Space, part_name
from penstock.store.disk import format as disk_format
from penstock.store.disk.format import ASSOCIATED_BYTES
from penstock.vocabulary.checksums import SUM_BYTES, CellSpan
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.store.disk.format import DiskCipher

FORM = Form(
    layout=Layout.split(
        layers=range(2),
        heads=HeadRange.all_of(2),
        channels=4,
        dtype=DType.FP8_E4M3,
        block_tokens=4,
        block_count=1,
    )
)
SPAN = CellSpan.of(FORM.layout)
BLOCK_BYTES = FORM.layout.block_bytes
PART = part_name(FORM, rank=0, rank_count=1, equal=False)
SPACE = Space(bytes(range(16)), 3)
LIFE = 0x0123_4567_89AB_CDEF
WRITTEN_AT = 1_790_000_000


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def key_field(key: bytes) -> np.void:
    """As it stands in rows and trailers."""
    return np.void(key.ljust(disk_format.ROW["key"].itemsize, b"\0"))


def seal_trailer(head: NDArray[np.void], sums: NDArray[np.uint64]) -> bytes:
    """A trailer (one record of `TRAILER_HEAD`) with the cell sums after it, not padded."""
    raw = bytearray(head.tobytes())
    table = sums.astype("<u8", copy=False).tobytes()
    total = xxh3_64_intdigest(bytes(raw[:-SUM_BYTES]) + table)
    raw[-SUM_BYTES:] = total.to_bytes(SUM_BYTES, "little")
    return bytes(raw) + table


def block_of(number: int) -> bytes:
    return shake_128(key_of(number)).digest(BLOCK_BYTES)


def sums_of(block: bytes, key: bytes, salt: int = 0) -> NDArray[np.uint64]:
    rows = np.frombuffer(block, dtype=np.uint8).reshape(1, -1)
    return SPAN.sum_blocks(rows, [key], FORM.checksum, salt=salt)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A segment with a block for each of `numbers`, in this order from slot 0 on."""

    numbers: Sequence[int]
    slot_count: int = 4
    life: int = LIFE
    age: int = 1
    space: Space = SPACE
    salt: int = 0
    blanked: Sequence[int] = ()
    """Slots whose row was filled with zeros: the block is forgotten."""
    written_at: int = WRITTEN_AT
    cipher: DiskCipher | None = None

    @property
    def geometry(self) -> disk_format.Geometry:
        smallest = disk_format.Geometry(
            segment_bytes=1 << 30, block_bytes=BLOCK_BYTES, cell_count=len(SPAN.cells)
        )
        size = smallest.slots_offset(self.slot_count) + self.slot_count * smallest.slot_bytes
        return disk_format.Geometry(
            segment_bytes=size, block_bytes=BLOCK_BYTES, cell_count=len(SPAN.cells)
        )

    def head(self) -> NDArray[np.void]:
        geometry = self.geometry
        head = np.zeros((), dtype=disk_format.HEAD)
        head["magic"] = disk_format.MAGIC
        head["version"] = disk_format.VERSION
        if self.cipher is not None:
            head["cipher"] = disk_format.CIPHER_AES_GCM
            head["key_check"] = np.void(self.cipher.key_check)
        head["life"] = self.life
        head["age"] = self.age
        head["block_bytes"] = geometry.block_bytes
        head["slot_bytes"] = geometry.slot_bytes
        head["slot_count"] = geometry.slot_count
        head["cell_count"] = geometry.cell_count
        head["algorithm"] = FORM.checksum.value.encode()
        head["part"] = np.void(PART)
        head["form"] = np.void(FORM.fingerprint)
        return head[()]

    def block(self, slot: int) -> bytes:
        """As it lies in the file."""
        return self._sealed(slot)[0]

    def _sealed(self, slot: int) -> tuple[bytes, bytes, bytes]:
        block = block_of(self.numbers[slot])
        if self.cipher is None:
            return block, bytes(12), bytes(16)
        nonce = shake_128(f"{self.life} {slot}".encode()).digest(12)
        associated = self._trailer_head(slot).tobytes()[:ASSOCIATED_BYTES]
        into = bytearray(BLOCK_BYTES)
        tag = self.cipher.seal(nonce, block, associated, into)
        return bytes(into), nonce, tag

    def trailer(self, slot: int) -> bytes:
        number = self.numbers[slot]
        head = self._trailer_head(slot)
        _, nonce, tag = self._sealed(slot)
        head["nonce"] = np.void(nonce)
        head["tag"] = np.void(tag)
        return seal_trailer(head, sums_of(block_of(number), key_of(number), self.salt))

    def _trailer_head(self, slot: int) -> NDArray[np.void]:
        number = self.numbers[slot]
        head = np.zeros((), dtype=disk_format.TRAILER_HEAD)
        head["life"] = self.life
        head["key"] = key_field(key_of(number))
        head["space"] = np.void(self.space.name)
        head["generation"] = self.space.generation
        head["salt"] = self.salt
        head["slot"] = slot
        head["cell_count"] = len(SPAN.cells)
        return head[()]

    def rows(self) -> NDArray[np.void]:
        rows = np.zeros(len(self.numbers), dtype=disk_format.ROW)
        rows["life"] = self.life
        rows["space"] = np.void(self.space.name)
        rows["generation"] = self.space.generation
        rows["written_at"] = self.written_at
        for slot, number in enumerate(self.numbers):
            trailer = disk_format.read_trailer(self.trailer(slot))
            assert trailer is not None
            rows[slot]["key"] = key_field(key_of(number))
            parent = key_of(self.numbers[slot - 1]) if slot else NO_KEY
            rows[slot]["parent"] = key_field(parent)
            rows[slot]["trailer_sum"] = trailer[0]["sum"]
            rows[slot]["slot"] = slot
        sealed = disk_format.seal_rows(rows)
        sealed[list(self.blanked)] = np.zeros((), dtype=disk_format.ROW)
        return sealed

    def image(self) -> bytearray:
        """All bytes of the file."""
        geometry = self.geometry
        image = bytearray(geometry.segment_bytes)
        table = self.rows().tobytes()
        pieces = [(0, disk_format.seal_head(self.head())), (geometry.row_offset(0), table)]
        for slot in range(len(self.numbers)):
            at = geometry.offset(slot)
            pieces += [
                (at, self.block(slot)),
                (at + geometry.trailer_offset, self.trailer(slot)),
            ]
        for at, raw in pieces:
            image[at : at + len(raw)] = raw
        return image

    def write(self, folder: Path, number: int = 0) -> Path:
        path = folder / f"{number:08d}.segment"
        path.write_bytes(self.image())
        return path
