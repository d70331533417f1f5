"""`python -m lab`."""

import sys

from lab.cli.app import run

sys.exit(run())
