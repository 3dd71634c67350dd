"""A model larger than memory: moeflow reading experts, and peers on the same GGUF file, under the same limit.

    python benchmarks/peers/run.py setup --peer llama
    python benchmarks/offload/run.py model --weights int8    make the GGUF file and pack it (21 GB, once)
    python benchmarks/offload/run.py measure --weights int8 --out docs/results/offload.jsonl

Everything lies in `.peers` unless `--folder` names another place. Of the folder `big` in it, only the tokenizer is
needed once the file is written. The limit is a cgroup's, so that it holds for memory and page cache alike: that takes
root.

ik_llama.cpp, which reads chosen experts ahead, is measured as well where `setup --ik-llama CHECKOUT` has built it. One
more peer is in no registry; who has built it from its sources measures it too:

    --bigmoe PROGRAM      BigMoeOnEdge's `bmoe-cli`; its registry of architectures needs a row for `llama`, which is how
                          GGUF calls Mixtral, and `--bigmoe-options=--overlap` a build with its hook in ggml
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that this runs from any folder
    from benchmarks import needs

    needs.explain_missing()
    runpy.run_module("benchmarks.offload", run_name="__main__")
