"""The number formats that KV comes in, and how many bytes a number takes.

Penstock never computes with KV; of a number format it needs the size and a name that every
engine spells the same way. The one rule: a name that is not in the table is refused, because
a guessed size would read the wrong bytes.
"""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """A number format; its value is its name in forms and on the wire."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"
    """NumPy's default; no engine keeps its KV like this."""
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0 = "fp8_e8m0"
    """Powers of two alone: the scales of microscaling formats."""
    INT8 = "int8"
    UINT8 = "uint8"
    """Plain bytes, also for formats that pack several numbers into one."""

    @property
    def itemsize(self) -> int:
        """How many bytes one number takes."""
        return _ITEMSIZES[self]

    @classmethod
    def parse(cls, name: str) -> DType:
        """The format that `name` means; the names of torch and NumPy are understood too."""
        bare = name.removeprefix("torch.").lower()
        canonical = _ALIASES.get(bare, bare)
        try:
            return cls(canonical)
        except ValueError:
            known = ", ".join(DTYPE_NAMES)
            raise ValueError(f"dtype is {name!r}, must be one of {known}") from None


_ITEMSIZES = {
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP32: 4,
    DType.FP64: 8,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
    DType.FP8_E8M0: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
}

_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e8m0fnu": "fp8_e8m0",
}

DTYPE_NAMES = tuple(sorted({*(each.value for each in DType), *_ALIASES}))
"""Every name that `DType.parse` understands, but for a leading `torch.`."""
