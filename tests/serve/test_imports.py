"""What the process that answers clients does without."""

from __future__ import annotations

import socket
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


def test_a_port_in_use_is_reported_before_the_http_libraries_are_imported() -> None:
    script = (
        "import sys\n"
        "from penstock.cli.app import run\n"
        "status = run(['serve', '--port', sys.argv[1]])\n"
        "print(status, {'uvicorn', 'starlette', 'torch'} & set(sys.modules))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        done = subprocess.run(
            [sys.executable, "-c", script, port], capture_output=True, text=True, check=True
        )

    assert done.stdout == "3 set()\n"
    assert done.stderr == f"penstock: cannot listen on 127.0.0.1:{port}: Address already in use\n"
