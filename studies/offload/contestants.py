"""Who is measured: our engine with predictors and policies to compare, and peers, all with the same GGUF file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from moeflow.core.errors import ConfigError
from moeflow.core.units import MIB
from studies.peers.contestants import SHARED, Contestant
from studies.peers.environments import IK_LLAMA_NATIVE, LLAMA

FOLDER = "big"  # in Hugging Face's form, which the files are made from; later only its tokenizer is needed
OURS, UNPREDICTED, PEER, RESIDENT = "moeflow", "moeflow, no prediction", "llama.cpp, mapped", "moeflow, resident"
IK_LLAMA_CPP, BIGMOE = "ik_llama.cpp, mapped, prefetching", "BigMoeOnEdge"
# What BigMoeOnEdge needs besides the dense weights and the cache that it is given: buffers, KV cache, its program.
BIGMOE_BESIDE_BYTES = 256 * MIB
_AS_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


@dataclass(frozen=True)
class Model:
    """The model in one format: the file that all load, and what moeflow packs of it."""

    folder: Path
    weights: str  # as moeflow calls the format

    @property
    def file(self) -> Path:
        """The GGUF file."""
        return self.folder.absolute() / f"big-{SHARED[self.weights]}.gguf"

    @property
    def packed(self) -> Path:
        """Our packed weights file."""
        return self.folder.absolute() / f"big-{self.weights}.slabs"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer by itself."""
        return self.folder.absolute() / FOLDER / "tokenizer.json"

    @property
    def dtype(self) -> str:
        """What moeflow is told of it."""
        return "auto" if self.weights in ("int8", "int4") else self.weights  # those are the file's own

    @property
    def num_bytes(self) -> int:
        """How large the weights are."""
        return self.file.stat().st_size

    @property
    def dense_bytes(self) -> int:
        """How large all weights are that are no expert's."""
        tensors = gguf.GGUFReader(self.file).tensors
        return sum(int(tensor.n_bytes) for tensor in tensors if "_exps" not in tensor.name)


@dataclass(frozen=True)
class Built:
    """Peers that no registry has; the user builds them from source."""

    bigmoe: Path | None = None  # the program
    bigmoe_options: tuple[str, ...] = ()

    def versions(self) -> dict[str, str]:
        """Return what the sources call their state, by peer."""
        if self.bigmoe is None:
            return {}
        return {BIGMOE: subprocess.run([self.bigmoe.absolute(), "--version"], **_AS_TEXT).stdout.strip()}


def ours(name: str, model: Model, **settings: Any) -> Contestant:
    """Return our engine with these settings."""
    wish = {"model": str(model.file), "weights": model.weights, "settings": {"dtype": model.dtype, **settings}}
    return Contestant(name, Path(sys.executable), "moeflow_engine", wish, "greedy")


def within(budget_bytes: int, model: Model, policies: Sequence[str], built: Built) -> list[Contestant]:
    """Return all contestants that run within a budget; a policy is compared with the default one."""
    limited = {"memory_bytes": budget_bytes, "packed_weights_file": str(model.packed)}
    return [
        *_mapping(model),
        *([] if built.bigmoe is None else [_bigmoe(built.bigmoe, built.bigmoe_options, budget_bytes, model)]),
        ours(OURS, model, **limited),
        ours(UNPREDICTED, model, **limited, predictor="none"),
        *(ours(f"moeflow, {policy}", model, **limited, expert_policy=policy) for policy in policies),
    ]


def _mapping(model: Model) -> list[Contestant]:
    """Return the contestants that map the file and let the system choose the pages to keep."""
    found = []
    wish = {"model": str(model.file)}
    if LLAMA.python(model.folder).exists():
        found.append(Contestant(PEER, LLAMA.python(model.folder), "llama", wish, "none: fed with tokens"))
    if IK_LLAMA_NATIVE.is_installed(model.folder):
        found.append(
            Contestant(
                IK_LLAMA_CPP,
                IK_LLAMA_NATIVE.python(model.folder),
                "ik_llama_prefetch",
                wish | IK_LLAMA_NATIVE.wish(model.folder),
                "none: fed with tokens",
                IK_LLAMA_NATIVE.process_variables(model.folder),
            )
        )
    return found


def _bigmoe(program: Path, options: Sequence[str], budget_bytes: int, model: Model) -> Contestant:
    cache_bytes = budget_bytes - model.dense_bytes - BIGMOE_BESIDE_BYTES
    if cache_bytes < MIB:
        raise ConfigError(f"within {budget_bytes / MIB:.0f} MiB no cache is left for {BIGMOE}: measure a larger share")
    wish = {
        "model": str(model.file),
        "program": str(program.absolute()),
        "tokenizer": str(model.tokenizer),
        "options": ["--cache-mb", str(cache_bytes // MIB), "--force-cache", *options],
    }
    return Contestant(BIGMOE, Path(sys.executable), "bigmoe", wish, "greedy")
