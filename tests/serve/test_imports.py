"""What the process that answers clients does without."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, penstock.cli.serve, penstock.serve.plan, penstock.serve.service\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set()\n"
