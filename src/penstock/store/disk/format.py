"""The files of a disk tier: segments of slots with a table of rows at their head, encrypted or not.

    folder/
      lock                  flock of the one store process that writes here
      generations           the generation of each space (`read_generations`)
      FINGERPRINT.form      a form that segments name, in full (`write_form`, once for each form)
      NNNNNNNN.segment      preallocated; N is the number of the file, not its age

    segment = head (4096 bytes), table (256 bytes a slot, whole pages), slots
    slot    = block (`block_bytes`), trailer (256 bytes and 8 a cell), each padded to 4096

A segment has slots of one geometry, for blocks of one part. Its head names its *life*: 64 random
bits that are drawn anew whenever the segment begins to be filled again. Rows and trailers repeat
the life, so a new head voids all of them at once.

Order of writes: head (synced), then for each slot block and trailer, then its row. A row says that
the slot was written in full. After a process was killed that is true. After a power loss a row may
be there without its block: the sums in the trailer, and those of the cells, find that.

Numbers are little-endian. `docs/disk-format.md` is the specification, with test vectors.

Blocks are encrypted, each with a tag that binds it to its trailer. Heads, rows and cell sums stay
readable, so recovery and `penstock store inspect` need no key (docs/disk-format.md says what that
leaves open).

The one rule: a nonce is used once under a key, so the caller draws one for every write. A nonce
made of the segment's life and the slot would repeat: after a restart nobody knows whether a slot
without a row was written. Two of n random ones are equal with probability n²/2⁹⁷, which is 2⁻³³
after 2³² blocks (1 PiB of blocks of 256 KiB).

Needs the `disk-encryption` extra.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from penstock.errors import ConfigError, UnavailableError
from penstock.store.base import DIGEST_BYTES
from penstock.vocabulary.checksums import SUM_BYTES, mix64_sums
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


MAGIC = b"PENSTOCK"
VERSION = 1
PAGE_BYTES = 4096
ROW_BYTES = 256
TRAILER_HEAD_BYTES = 256
SEGMENT_BYTES = 1 << 30
GENERATIONS_NAME = "generations"
GENERATIONS_COPY_NAME = "generations.copy"
"""The second record of the same."""
FORM_SUFFIX = ".form"
FILE_MODE = 0o600
Folder = Path | int
"""A folder by its path, or by a descriptor: its path may lead to another one by now."""
CIPHER_NONE = 0
CIPHER_AES_GCM = 1

HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("cipher", "<u4"),
        ("life", "<u8"),
        ("age", "<u8"),  # Counts segments in the order in which they began to be filled.
        ("block_bytes", "<u8"),
        ("slot_bytes", "<u8"),  # From one slot to the next: block, trailer, padding.
        ("slot_count", "<u4"),
        ("cell_count", "<u4"),
        ("algorithm", "S16"),
        ("part", "V16"),
        ("form", "V16"),
        ("key_check", "V16"),  # Of the encryption key; zeros without one.
        ("reserved", "V128"),
        ("sum", "<u8"),  # XXH3-64 of the bytes before it.
    ]
)
"""The first bytes of a segment; the rest of the page is zeros."""

ROW = np.dtype(
    [
        ("life", "<u8"),
        ("key", "V32"),  # Keys have 16 bytes today; zeros follow.
        ("parent", "V32"),  # Zeros: the first block of its chain.
        ("space", "V16"),
        ("generation", "<u8"),
        ("trailer_sum", "<u8"),
        ("written_at", "<u8"),  # Seconds since 1970, for people.
        ("slot", "<u4"),
        ("flags", "<u4"),  # None yet: zero.
        ("reserved", "V128"),
        ("sum", "<u8"),  # mix64 of the bytes before it, under the seed `life`.
    ]
)

TRAILER_HEAD = np.dtype(
    [
        ("life", "<u8"),
        ("key", "V32"),
        ("space", "V16"),
        ("generation", "<u8"),
        ("salt", "<u8"),  # Of the cell sums.
        ("slot", "<u4"),
        ("cell_count", "<u4"),
        ("nonce", "V12"),
        ("tag", "V16"),
        ("reserved", "V140"),
        ("sum", "<u8"),  # XXH3-64 of the bytes before it and of the cell sums after it.
    ]
)
"""The first bytes of a trailer; the cell sums follow, eight bytes each."""

assert (HEAD.itemsize, ROW.itemsize, TRAILER_HEAD.itemsize) == (256, ROW_BYTES, TRAILER_HEAD_BYTES)


def round_up(size: int, unit: int = PAGE_BYTES) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where the table, the slots and their trailers lie in a segment of `segment_bytes`."""

    segment_bytes: int
    block_bytes: int
    cell_count: int
    # What follows from these is asked for with every block.
    trailer_offset: int = field(init=False)
    """Within a slot."""
    trailer_bytes: int = field(init=False)
    slot_bytes: int = field(init=False)
    slot_count: int = field(init=False)
    first_offset: int = field(init=False)
    """Where slot 0 begins."""

    def __post_init__(self) -> None:
        trailer_offset = round_up(self.block_bytes)
        trailer_bytes = round_up(TRAILER_HEAD_BYTES + self.cell_count * SUM_BYTES)
        slot_bytes = trailer_offset + trailer_bytes
        count = (self.segment_bytes - PAGE_BYTES) // (slot_bytes + ROW_BYTES)
        # The table ends with a page, for which a slot may have to go.
        while count > 0 and self.slots_offset(count) + count * slot_bytes > self.segment_bytes:
            count -= 1
        if count < 1:
            raise ValueError(
                f"segment_bytes is {self.segment_bytes}, must have room for one slot of "
                f"{slot_bytes} bytes"
            )
        for name, value in (
            ("trailer_offset", trailer_offset),
            ("trailer_bytes", trailer_bytes),
            ("slot_bytes", slot_bytes),
            ("slot_count", count),
            ("first_offset", self.slots_offset(count)),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def least_bytes(cls, *, block_bytes: int, cell_count: int) -> int:
        """The size of a segment with one slot."""
        one = cls(segment_bytes=1 << 62, block_bytes=block_bytes, cell_count=cell_count)
        return cls.slots_offset(1) + one.slot_bytes

    @staticmethod
    def slots_offset(slot_count: int) -> int:
        """Where slot 0 begins."""
        return PAGE_BYTES + round_up(slot_count * ROW_BYTES)

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return self.first_offset + slot * self.slot_bytes

    @staticmethod
    def row_offset(slot: int) -> int:
        return PAGE_BYTES + slot * ROW_BYTES


def geometry_of(head: NDArray[np.void]) -> Geometry:
    """What a head says of its segment.

    Not from the length of the file: if that was cut, slots before the cut are where they were.
    Raises `ValueError`: no segment is like that.
    """
    slots, slot_bytes = int(head["slot_count"]), int(head["slot_bytes"])
    geometry = Geometry(
        segment_bytes=Geometry.slots_offset(slots) + slots * slot_bytes,
        block_bytes=int(head["block_bytes"]),
        cell_count=int(head["cell_count"]),
    )
    if geometry.slot_bytes != slot_bytes:
        raise ValueError(f"slot_bytes is {slot_bytes}, must be {geometry.slot_bytes}")
    return geometry


def seal_head(head: NDArray[np.void]) -> bytes:
    """A head (one record of `HEAD`) as its page, with its sum."""
    raw = bytearray(head.tobytes())
    raw[-SUM_BYTES:] = xxh3_64_intdigest(bytes(raw[:-SUM_BYTES])).to_bytes(SUM_BYTES, "little")
    return bytes(raw).ljust(PAGE_BYTES, b"\0")


def read_head(page: bytes) -> NDArray[np.void] | None:
    """The head in a page, if it is whole and of this format; `None` if not.

    Raises `ValueError`: it is whole, and of another version.
    """
    raw = page[: HEAD.itemsize]
    if len(raw) < HEAD.itemsize or raw[: len(MAGIC)] != MAGIC:
        return None
    if int.from_bytes(raw[-SUM_BYTES:], "little") != xxh3_64_intdigest(raw[:-SUM_BYTES]):
        return None
    head: NDArray[np.void] = np.frombuffer(raw, dtype=HEAD)[0]
    if head["version"] != VERSION:
        raise ValueError(f"format version is {head['version']}, must be {VERSION}")
    try:
        geometry_of(head)
    except ValueError:
        return None
    return head


def seal_rows(rows: NDArray[np.void]) -> NDArray[np.void]:
    """The rows (records of `ROW`) with their sums."""
    sealed = rows.copy()
    sealed["sum"] = _row_sums(sealed)
    return sealed


def sound_rows(rows: NDArray[np.void], life: int) -> NDArray[np.bool_]:
    """Which rows of a table were written in full, in this life, and for the slot they stand at."""
    here = rows["slot"] == np.arange(len(rows), dtype=np.uint32)
    sound: NDArray[np.bool_] = here & (rows["life"] == life) & (rows["sum"] == _row_sums(rows))
    return sound


def _row_sums(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), 1, ROW_BYTES)
    seeds = np.ascontiguousarray(rows["life"]).astype(np.uint64).reshape(-1, 1)
    return mix64_sums(raw[..., :-SUM_BYTES], seeds)[:, 0]


def read_trailer(raw: bytes) -> tuple[NDArray[np.void], NDArray[np.uint64]] | None:
    """The head and the cell sums of a trailer, if it is whole; `None` if not."""
    if len(raw) < TRAILER_HEAD_BYTES:
        return None
    head: NDArray[np.void] = np.frombuffer(raw[:TRAILER_HEAD_BYTES], dtype=TRAILER_HEAD)[0]
    end = TRAILER_HEAD_BYTES + int(head["cell_count"]) * SUM_BYTES
    if end > len(raw):
        return None
    table = raw[TRAILER_HEAD_BYTES:end]
    if int(head["sum"]) != xxh3_64_intdigest(raw[: TRAILER_HEAD_BYTES - SUM_BYTES] + table):
        return None
    return head, np.frombuffer(table, dtype="<u8").astype(np.uint64, copy=False)


assert DIGEST_BYTES == HEAD["part"].itemsize == ROW["space"].itemsize


class _Generations(msgspec.Struct, frozen=True):
    """The content of the file of that name."""

    version: int
    generations: dict[str, int]
    """By the name of a space, in hexadecimal digits."""
    sum: str
    """XXH3-64, as hexadecimal digits, of `generations` as JSON without blanks, sorted by name."""


def write_generations(
    folder: Folder, generations: Mapping[bytes, int], name: str = GENERATIONS_NAME
) -> None:
    """Replaces the generations of all spaces; they are on the disk when this returns."""
    spaces = {space.hex(): generation for space, generation in generations.items()}
    content = _Generations(VERSION, spaces, _sum_of_generations(spaces))
    _replace_file(folder, name, msgspec.json.encode(content, order="sorted"))


def read_generations(folder: Folder, name: str = GENERATIONS_NAME) -> dict[bytes, int] | None:
    """What `write_generations` wrote: the generation of each space; `None` if there is no file.

    Raises `ValueError`: the file is damaged or of another version. Which generation counts is then
    not known for any space, so none of its blocks may be matched.
    """
    try:
        content = msgspec.json.decode(_read_file(folder, name), type=_Generations)
        generations = {bytes.fromhex(space): each for space, each in content.generations.items()}
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as problem:
        raise ValueError(f"{name} is damaged: {problem}") from problem
    if content.version != VERSION:
        raise ValueError(f"{name} has version {content.version}, must be {VERSION}")
    if content.sum != _sum_of_generations(content.generations):
        raise ValueError(f"{name} is damaged: its sum does not hold")
    return generations


def _sum_of_generations(spaces: dict[str, int]) -> str:
    return xxh3_64_hexdigest(msgspec.json.encode(spaces, order="sorted"))


def write_form(folder: Folder, form: Form) -> None:
    """Keeps a form beside the segments that name it, unless it is there already.

    A segment has only the fingerprint of its form. Whoever checks cell sums without the engine
    needs all of it.
    """
    if read_form(folder, form.fingerprint) is None:
        _replace_file(folder, form.fingerprint.hex() + FORM_SUFFIX, form.to_bytes())


def read_form(folder: Folder, fingerprint: bytes) -> Form | None:
    """The form with this fingerprint; `None` if its file is missing, damaged or newer than this."""
    try:
        form = Form.from_bytes(_read_file(folder, fingerprint.hex() + FORM_SUFFIX))
    except (FileNotFoundError, ValueError):
        return None
    return form if form.fingerprint == fingerprint else None


def _read_file(folder: Folder, name: str) -> bytes:
    """The content of a small file.

    Raises `ValueError`: it is no file; `OSError`: it cannot be read.
    """
    try:
        fd = _open_in(folder, name, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError("it is a symbolic link") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is no regular file")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def _replace_file(folder: Folder, name: str, content: bytes) -> None:
    """Writes a small file so that a crash leaves the old or the new one, and syncs it."""
    new = f"{name}.new"
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if isinstance(folder, Path) else folder
    try:
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=within)
        with open(_open_in(within, new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, name, src_dir_fd=within, dst_dir_fd=within)
        os.fsync(within)
    finally:
        if isinstance(folder, Path):
            os.close(within)


def _open_in(folder: Folder, name: str, flags: int) -> int:
    """Opens a file of a folder: no link is followed, and a pipe of that name does not block."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if isinstance(folder, Path):
        return os.open(folder / name, flags, FILE_MODE)
    return os.open(name, flags, FILE_MODE, dir_fd=folder)


CIPHER_KEY_BYTES = 32
ASSOCIATED_BYTES = 80
"""How much of a trailer the tag covers: life, key, space, generation, salt, slot, cell count."""
KEY_CHECK_DOMAIN = b"penstock.disk.key-check.v1"


class DiskCipher:
    """Encrypts and decrypts blocks under one key.

    Buffers are anything with the buffer protocol. Nothing is copied but from one into the other,
    which may be the same. One object may be used by several threads.

    Raises:
        UnavailableError: `cryptography` is not installed.
    """

    number = CIPHER_AES_GCM
    """In the head of a segment."""

    def __init__(self, key: bytes) -> None:
        try:
            # Here, so that a disk tier without encryption does without the package.
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415
            from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415
                Cipher,
                algorithms,
                modes,
            )
            from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415
        except ImportError as problem:
            raise UnavailableError(
                "encryption of a disk tier needs the package cryptography: install the extra "
                f"disk-encryption ({problem})"
            ) from problem
        if len(key) != CIPHER_KEY_BYTES:
            raise ValueError(f"key has {len(key)} bytes, must have {CIPHER_KEY_BYTES}")
        derive = HKDF(algorithm=SHA256(), length=DIGEST_BYTES, salt=None, info=KEY_CHECK_DOMAIN)
        self.key_check: bytes = derive.derive(key)
        """Tells keys apart without giving one away; stands in the head of a segment."""
        self._algorithm = algorithms.AES(key)
        self._cipher = Cipher
        self._gcm = modes.GCM
        self._wrong = InvalidTag

    def seal(
        self,
        nonce: bytes,
        block: bytes | bytearray | memoryview,
        associated: bytes,
        into: bytearray | memoryview,
    ) -> bytes:
        """Encrypts a block into a buffer of its length, and returns the tag.

        `associated` is not encrypted, but a block opens only beside the same.
        """
        context = self._cipher(self._algorithm, self._gcm(nonce)).encryptor()
        context.authenticate_additional_data(associated)
        context.update_into(block, into)
        context.finalize()
        tag: bytes = context.tag
        return tag

    def open(
        self,
        nonce: bytes,
        block: bytes | bytearray | memoryview,
        tag: bytes,
        associated: bytes,
        into: bytearray | memoryview,
    ) -> bool:
        """Decrypts a block into a buffer of its length.

        Returns:
            Whether it is what was sealed under this key. If not, `into` is zeros.
        """
        context = self._cipher(self._algorithm, self._gcm(nonce, tag)).decryptor()
        context.authenticate_additional_data(associated)
        context.update_into(block, into)
        try:
            context.finalize()
        except self._wrong:
            memoryview(into).cast("B")[:] = bytes(memoryview(into).nbytes)
            return False
        return True


def load_cipher(path: Path) -> DiskCipher:
    """The cipher under the key in a file: 32 bytes, or 64 hexadecimal digits.

    Raises `ConfigError`: the file cannot be read, others can read it, or it holds no key;
    `UnavailableError`: `cryptography` is not installed.
    """
    try:
        # A pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        raise ConfigError("key_file", f"{path} cannot be read: {problem.strerror}") from problem
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError("key_file", f"{path} is not a file, must be one with a key")
        if found.st_mode & 0o077:
            raise ConfigError(
                "key_file",
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, must be for its owner alone: "
                "0600 or 0400",
            )
        # One byte more than the longest, hexadecimal digits and a line end: too long is not a key.
        raw = os.read(descriptor, 2 * CIPHER_KEY_BYTES + 3)
    finally:
        os.close(descriptor)
    return DiskCipher(_key_in(raw, path))


def _key_in(raw: bytes, path: Path) -> bytes:
    if len(raw) == CIPHER_KEY_BYTES:
        return raw
    text = raw.strip()
    try:
        key = bytes.fromhex(text.decode("ascii")) if len(text) == 2 * CIPHER_KEY_BYTES else b""
    except ValueError:
        key = b""
    if len(key) != CIPHER_KEY_BYTES:
        # Not what it holds: it may be most of a key.
        raise ConfigError(
            "key_file",
            f"{path} holds no key, must hold {CIPHER_KEY_BYTES} bytes or "
            f"{2 * CIPHER_KEY_BYTES} hexadecimal digits",
        )
    return key
