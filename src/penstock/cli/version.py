"""`penstock version`: what a report of a problem should begin with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("penstock", "numpy", "msgspec", "xxhash", "pyzmq", "torch")


def show_version() -> None:
    """Print the versions of Penstock, of Python and of what Penstock uses."""
    rows = {package: _installed(package) for package in PACKAGES}
    rows |= {"python": platform.python_version(), "system": platform.platform()}
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
