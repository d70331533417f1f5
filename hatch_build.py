"""Builds the compiled code for a wheel, or for an editable installation in its tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags


class CompiledCode(BuildHookInterface[Any]):
    """What hatchling calls for the wheel of `pyproject.toml`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Builds it, and has the wheel say for which machines it is."""
        sys.path.insert(0, str(Path(self.root, "src")))
        from penstock.movers.compiled import build  # noqa: PLC0415 - it is there from now on

        made = build().relative_to(self.root)
        # git ignores it, and hatchling leaves out what git ignores.
        build_data["artifacts"].append(f"/{made}")
        build_data["pure_python"] = False
        # It is loaded by ctypes: any Python 3. The platform names the C library of this machine;
        # an older one may lack what the linker took.
        platform = next(tag for tag in platform_tags() if not tag.startswith("linux_"))
        build_data["tag"] = f"py3-none-{platform}"
