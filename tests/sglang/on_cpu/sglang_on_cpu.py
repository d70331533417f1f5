"""Lets SGLang run on a machine without a GPU: every process of `.venv-sglang` imports this first.

`.ci/sglang-environment` puts a `.pth` file beside SGLang that names this folder and imports this
module. SGLang asks for CUDA where it is imported and where it sets memory up, not in what the tests
run: the PyTorch attention, sampling and scheduling that it has for any device.

| what SGLang wants                              | what it gets here                          |
|------------------------------------------------|--------------------------------------------|
| torchvision, of which only CUDA builds exist   | an empty module; others see that it lacks  |
| compiled kernels, if the host is an arm64 CPU  | "this is no arm64 CPU": there is no wheel  |
| pinned memory                                  | ordinary memory                            |
| CUDA events                                    | events that have always happened           |
| a host pool registered with CUDA               | a host pool                                |
| 10 GB left free beside a host pool             | a host pool that fits                      |
| a compiled copy between device and host pool   | the same copy by indexing                  |

Every change is made when the module that it is about has been imported, and nothing is changed in
a process that does not import SGLang.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LACKING = "torchvision"
ASKS_WHAT_IS_THERE = ("transformers/utils/import_utils.py", "/torch/_dynamo/")
"""Code that goes another way where the package is missing: it must not see the empty one."""


class EmptyModule(ModuleType):
    """Has every name: a class that can be made and called, and does nothing."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        nothing = type(
            name,
            (),
            {
                "__init__": lambda *_, **__: None,
                "__call__": lambda *_, **__: None,
                "__getattr__": lambda *_: None,
            },
        )
        setattr(self, name, nothing)
        return nothing


class EmptyPackage(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the lacking package, behind all other finders: an installed one counts."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != LACKING or _is_asked_for_by(ASKS_WHAT_IS_THERE):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _is_asked_for_by(places: Sequence[str]) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in places):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Event:
    """A CUDA event in a process where everything has happened when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


def _utils(module: Any) -> None:
    """SGLang's own utilities, which everything of it imports: torch is there by then."""
    import torch  # noqa: PLC0415 - not before SGLang itself has imported it

    module.is_host_cpu_arm64 = lambda: False
    torch.cuda.Event = Event
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_unpinned(*args: Any, **how: Any) -> Any:
        how.pop("pin_memory", None)
        return make(*args, **how)

    make_unpinned.__wrapped__ = make  # type: ignore[attr-defined]
    return make_unpinned


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _registered_memory(module: Any) -> None:
    module._cuda_host_register = module._cuda_host_unregister = _nothing


def _memory_left(module: Any) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _kernels(module: Any) -> None:
    module.require_kvcacheio_ops = _nothing


def _host_pool(module: Any) -> None:
    module.require_kvcacheio_ops = _nothing
    module.transfer_kv_direct = _copy_pages
    for kind in vars(module).copy().values():
        if isinstance(kind, type) and "get_dummy_flat_data_page" in vars(kind):
            kind.get_dummy_flat_data_page = _without_pinning(kind.get_dummy_flat_data_page)


def _copy_pages(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int = 1,  # noqa: ARG001 - indices are of tokens, whatever a page has
) -> None:
    """Copies tokens between pools, layer by layer; the names of the arguments are SGLang's."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.to(target.device)] = source[src_indices.to(source.device)]


def _without_pinning(make_page: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(pool: Any) -> Any:
        pool.pin_memory = False
        return make_page(pool)

    return make


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.utils.common": _utils,
    "sglang.srt.mem_cache.pool_host.common": _registered_memory,
    "sglang.srt.mem_cache.pool_host.base": _memory_left,
    "sglang.srt.mem_cache.pool_host._kvcacheio": _kernels,
    "sglang.srt.mem_cache.pool_host.mha": _host_pool,
}


class ChangedModules(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed, before all other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, *_: Any
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = ChangingLoader(spec.loader, CHANGES[name])
        return spec


class ChangingLoader(importlib.abc.Loader):
    """Loads a module as another loader does, and changes it then."""

    def __init__(self, loader: importlib.abc.Loader, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


sys.meta_path.insert(0, ChangedModules())
sys.meta_path.append(EmptyPackage())
