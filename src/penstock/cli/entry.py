"""Where the `penstock` command begins.

The one rule that must not break: up to the check below nothing is imported but the standard
library, so that an installation without the `cli` extra answers `--version`, and everything else
with one sentence instead of a traceback.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.errors import install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

CANNOT_RUN_HERE = 3
"""The same as `ExitStatus.CANNOT_RUN_HERE`, which may not be imported yet."""
INTERRUPTED = 130
"""As a shell has it for a command that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one `penstock` command, by default from `sys.argv`, and returns its exit status."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        # While modules are imported, which takes a second of some commands.
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    if find_spec("typer") is None or find_spec("rich") is None:
        if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
            print(f"penstock {__version__}")
            return 0
        message = f"the command line needs the 'cli' extra: {install_hint('cli')}"
        print(f"penstock: {message}", file=sys.stderr)
        return CANNOT_RUN_HERE
    from penstock.cli.app import run  # noqa: PLC0415  (needs the extra that was just checked)

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
