"""How a process of an engine ends without the interpreter's own end."""

from __future__ import annotations

import subprocess
import sys

LIMIT_S = 600.0


def test_a_process_that_leaves_makes_its_callbacks_and_writes_what_it_printed() -> None:
    """`leave` calls a private function of the interpreter: this fails where it is missing."""
    program = (
        "import atexit, sys\n"
        "from penstock_serve.engine.process_life import leave\n"
        "class Never:\n"
        "    def __del__(self): print('taken apart')\n"
        "kept = Never()\n"
        "atexit.register(print, 'first')\n"
        "atexit.register(print, 'second')\n"
        "sys.stdout.write('printed ')\n"
        "leave(7)\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "printed second\nfirst\n", "")
