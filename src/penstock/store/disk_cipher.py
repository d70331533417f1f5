"""Encryption at rest for a disk tier: AES-256-GCM, with a key from a file.

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

import os
import stat
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, UnavailableError
from penstock.store.base import DIGEST_BYTES
from penstock.store.disk_format import CIPHER_AES_GCM

if TYPE_CHECKING:
    from pathlib import Path

KEY_BYTES = 32
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
        if len(key) != KEY_BYTES:
            raise ValueError(f"key has {len(key)} bytes, must have {KEY_BYTES}")
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
        raw = os.read(descriptor, 2 * KEY_BYTES + 3)
    finally:
        os.close(descriptor)
    return DiskCipher(_key_in(raw, path))


def _key_in(raw: bytes, path: Path) -> bytes:
    if len(raw) == KEY_BYTES:
        return raw
    text = raw.strip()
    try:
        key = bytes.fromhex(text.decode("ascii")) if len(text) == 2 * KEY_BYTES else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        # Not what it holds: it may be most of a key.
        raise ConfigError(
            "key_file",
            f"{path} holds no key, must hold {KEY_BYTES} bytes or {2 * KEY_BYTES} hexadecimal "
            "digits",
        )
    return key
