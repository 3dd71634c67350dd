"""Runs the command: see `command.py`."""

import sys

from studies.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
