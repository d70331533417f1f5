"""For engines whose KV are torch tensors, and whose steps run on CUDA streams.

The one rule: this module alone of the exported ones loads torch, and CUDA, with the first name that
needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy_names import load_name

if TYPE_CHECKING:
    from penstock.movers.cuda.marks import Marks as Marks  # events at places of a stream, reused
    from penstock.movers.cuda.marks import StreamMark as StreamMark  # one place of a stream
    from penstock.movers.cuda.streams import Bell as Bell  # a device rings it, a thread waits
    from penstock.movers.cuda.streams import StreamEvent as StreamEvent
    from penstock.tiers.tensors import Held as Held  # a tensor, and what its axes count
    from penstock.tiers.tensors import TensorGroup as TensorGroup  # layers with one block table
    from penstock.tiers.tensors import TensorLayer as TensorLayer  # where the KV of a layer lies
    from penstock.tiers.tensors import TensorTier as TensorTier  # device memory made of tensors
else:

    def __getattr__(name: str) -> object:
        return globals().setdefault(name, load_name(__name__, name))
