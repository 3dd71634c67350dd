"""What a model's keys and values depend on beside tokens, as one number: equal numbers, equal bits.

It covers the checkpoint, the formats of its weights, keys and values, and the computation: instruction set, options,
compiled kernels, and the modules that call them. Any doubt counts as different; a new version of moeflow begins with an
empty cache.
"""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeflow import checkpoint as checkpoints
from moeflow import core, kernels, models
from moeflow.checkpoint.identity import checkpoint_identity, sampled_bytes
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.core.engine_config import EngineConfig
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.saved import folders_of
from moeflow.planner.choices.packed_files import used_packed_weights_file

IDENTITY_BYTES: Final = 32
_PACKAGES: Final = ("moeflow", "numpy", "torch")  # that compute a part, be it only rotary tables


def kv_identity(config: EngineConfig) -> bytes:
    """Return the identity of the model that an engine computes as configured, in this process.

    The instruction set must be set up. Raises: CheckpointError, OSError.
    """
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        facts = {
            "checkpoint": [checkpoint_identity(checkpoint), sampled_bytes(checkpoint)],
            "config": dict(checkpoint.config),
            "weights": _weights(config),
            "routing": _routing(config),
            "arithmetic": [config.dtype, config.is_wide, config.device, extension.isa_name()],
            "kv": [config.kv_dtype, config.scheduler.block_size],
            "code": _code(),
            "platform": _platform(),
        }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


def _weights(config: EngineConfig) -> list[Any]:
    """Return the formats of weights, with the rounding of formats that use learnt importance."""
    formats = (
        config.weight_format,
        config.embedding_format,
        config.head_format,
        config.layer_table_format,
        config.router_format,
        config.mix,
        repr(config.layer_formats),
    )
    if not config.mix:
        return [*formats]
    packed = used_packed_weights_file(config)
    if packed is not None and packed.exists():
        return [*formats, read_slab_index(packed).checksums]
    importance = Path(config.importance_file)
    return [*formats, _digest([importance] if config.importance_file else [])]


def _routing(config: EngineConfig) -> list[Any]:
    """Return whether a network chooses experts, and which one."""
    if not config.lossy_top_k:
        return []
    folder, _ = folders_of(Path(config.model_path), used_packed_weights_file(config))
    return [config.lossy_top_k, _digest(sorted(folder.rglob("*.safetensors")))]


def _code() -> str:
    """Return a hash over the kernels and all modules that read weights and compute keys and values."""
    packages = (core, kernels, checkpoints, models)
    files = (file for package in packages for file in Path(package.__path__[0]).rglob("*"))
    return _digest(sorted(file for file in files if file.suffix == ".py" or file.name.startswith("_cpu.")))


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _platform() -> list[Any]:
    """Return what else numbers come from: NumPy computes by what the processor has."""
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return [platform.machine(), platform.libc_ver(), simd.get("found"), *map(_version, _PACKAGES)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
