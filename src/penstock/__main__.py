"""Lets `python -m penstock` stand for the `penstock` command, where no script was installed."""

import sys

from penstock.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
