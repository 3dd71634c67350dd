"""Ours against llama.cpp, ik_llama.cpp, vLLM and transformers, on one machine, in turns.

    python benchmarks/peers/run.py setup      install the peers, each in its own environment (long, once)
    python benchmarks/peers/run.py setup --ik-llama CHECKOUT     and compile ik_llama.cpp for this machine
    python benchmarks/peers/run.py model      write the model in everyone's format (11 GB, once)
    python benchmarks/peers/run.py check      does everyone compute the same?
    python benchmarks/peers/run.py measure --out docs/results/peers.jsonl
    python benchmarks/peers/run.py measure --isa avx2 --out docs/results/peers.jsonl
    python benchmarks/peers/run.py start --out docs/results/peer_starts.jsonl
    python benchmarks/peers/run.py perplexity --out docs/results/peer_scores.jsonl
    python benchmarks/peers/run.py serve --format int8 --rate 2 --rate 4 --out docs/results/serve.jsonl
    python benchmarks/peers/run.py speculate --out docs/results/speculation_peers.jsonl

Everything lies in `.peers` unless `--folder` names another place.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that this runs from any folder
    from benchmarks import needs

    needs.explain_missing()
    runpy.run_module("benchmarks.peers", run_name="__main__")
