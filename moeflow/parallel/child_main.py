"""Runs the `main` of a module in a process made for it: `python -m moeflow.parallel.child_main MODULE ARGUMENTS`.

For modules that import torch: nothing of it is garbage, and to look for some as it grows and again at the process's end
would take a quarter of what starting and ending it takes.
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
