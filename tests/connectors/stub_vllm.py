"""A package `vllm` of any version: the names that the connector imports, and nothing behind them.

What the connector does in a vLLM that it does not know can be seen without one: what counts is
which names there are. They are read from the connector's own modules; of its base class there is
what vLLM wants of every connector.
"""

from __future__ import annotations

import ast
from pathlib import Path

import penstock.connectors.vllm

CONNECTOR = Path(penstock.connectors.vllm.__file__).parent
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BASE_CLASS = """
import enum
from abc import ABC, abstractmethod


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):
    pass


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


class KVConnectorBase_V1(ABC):
    def __init__(self, {given}):
        self.role = role

"""
WANTED = (
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
)


def make_vllm(
    folder: Path,
    version: str,
    *,
    without: str = "",
    wanted: tuple[str, ...] = (),
    given: str = "vllm_config, role, kv_cache_config",
) -> None:
    """Writes the package.

    Args:
        folder: Where to.
        version: What it says it is.
        without: A name that it has not.
        wanted: Methods that it wants of connectors, beside those of the tested version.
        given: What connectors are made with.
    """
    modules = {"vllm": f"__version__ = {version!r}\n"}
    for module, names in _imported().items():
        text = modules.get(module, "")
        if module == BASE:
            text += BASE_CLASS.format(given=given) + "".join(
                f"    @abstractmethod\n    def {name}(self, *args): ...\n\n"
                for name in (*WANTED, *wanted)
            )
        for name in sorted(names - {"__version__"}):
            text += "" if f"class {name}(" in text else f"class {name}:\n    HOST = None\n"
        # A class that is gone leaves no name behind.
        modules[module] = text + (f"del {without}\n" if without in names else "")
    for module, text in modules.items():
        path = folder.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(text)


def _imported() -> dict[str, set[str]]:
    """The names that the connector imports from each of vLLM's modules."""
    found: dict[str, set[str]] = {}
    for file in CONNECTOR.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found.setdefault(str(node.module), set()).update(each.name for each in node.names)
    return found
