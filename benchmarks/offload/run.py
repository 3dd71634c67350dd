"""A model larger than memory: moeflow reading experts, and llama.cpp mapping the file, under the same limit.

    python benchmarks/peers/run.py setup --peer llama
    python benchmarks/offload/run.py model                   make model, packed weights file and GGUF file (30 GB, once)
    python benchmarks/offload/run.py measure --out docs/results/offload.jsonl

Everything lies in `.peers` unless `--folder` names another place. The limit is a cgroup's, so that it holds for memory
and page cache alike: that takes root.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that this runs from any folder
    runpy.run_module("benchmarks.offload", run_name="__main__")
