"""Runs the `main` of a module in a process made for it: `python -m moeflow.parallel.child_main MODULE ARGUMENTS`.

For modules that import torch: torch makes no garbage. Searching for it as torch loads and at the process's end would
take a quarter of the process's start and end.
"""

from __future__ import annotations

import gc
import sys

from moeflow.kernels.whole_import import import_whole


def main() -> None:
    """Entry point of the process."""
    module = import_whole(sys.argv.pop(1))
    gc.freeze()
    module.main()


if __name__ == "__main__":
    main()
