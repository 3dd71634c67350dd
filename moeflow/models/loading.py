"""From a checkpoint to a model in memory: what is in the file is held against what the model needs, then copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import CapacityError, CheckpointError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.layers.decoder import CausalLM
from moeflow.layers.placement import Placement
from moeflow.models.registry import Family, find_family, read_model_config

_LISTED = 3
_CHECK_CONFIG = "Check that config.json belongs to these weights, or download the model again"


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Return the model with its weights on `device` as `dtype`, reading one tensor at a time.

    `progress(bytes_done, bytes_total)` is called after each tensor; bytes are those of the file.

    Raises: CheckpointError, before anything is allocated, if tensors are missing, surplus or of another shape than
    the config says; CapacityError if the weights do not fit into the device's memory.
    """
    config = read_model_config(checkpoint)
    family = find_family(checkpoint)
    shapes = family.build(config, Placement(dtype, torch.device("meta")))
    _check_tensors(checkpoint, shapes)
    model = _allocate(family, config, shapes, Placement(dtype, device))
    _copy_weights(checkpoint, model, progress or _ignore)
    return model


def _check_tensors(checkpoint: Checkpoint, model: CausalLM) -> None:
    needed = {name: tuple(view.shape) for name, view in model.named_weights()}
    missing = [name for name in needed if name not in checkpoint.tensors]
    if missing:
        raise _blame(checkpoint.path, missing, "missing")
    # Tied models have no output matrix of their own, but some files repeat the embeddings under its name.
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    surplus = [name for name in checkpoint.tensors if name not in needed and name not in ignored]
    if surplus:
        raise _blame(checkpoint.tensors[surplus[0]].file, surplus, "not part of the model that config.json describes")
    for name, shape in needed.items():
        info = checkpoint.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"has the shape {list(info.shape)}, where config.json makes it {list(shape)}",
                file=info.file,
                tensor=name,
                remedy=_CHECK_CONFIG,
            )


def _blame(file: Path, names: list[str], problem: str) -> CheckpointError:
    if len(names) == 1:
        return CheckpointError(f"is {problem}", file=file, tensor=names[0], remedy=_CHECK_CONFIG)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(names[1:_LISTED]) + more
    return CheckpointError(f"is {problem}; so are {listed}", file=file, tensor=names[0], remedy=_CHECK_CONFIG)


def _allocate(family: Family, config: ModelConfig, shapes: CausalLM, place: Placement) -> CausalLM:
    try:
        return family.build(config, place)
    except RuntimeError as error:
        need = format_bytes(sum(weight.nbytes for _, weight in shapes.named_weights()))
        raise CapacityError(
            f"The weights need {need} on {place.device}, which cannot be allocated; "
            "take a smaller model, or bfloat16 if this is float32"
        ) from error


@torch.inference_mode()
def _copy_weights(checkpoint: Checkpoint, model: CausalLM, progress: Callable[[int, int], None]) -> None:
    weights: Mapping[str, Tensor] = dict(model.named_weights())
    bytes_total = sum(checkpoint.tensors[name].num_bytes for name in weights)
    bytes_done = 0
    for name, destination in weights.items():
        destination.copy_(checkpoint.read(name))
        bytes_done += checkpoint.tensors[name].num_bytes
        progress(bytes_done, bytes_total)


def _ignore(bytes_done: int, bytes_total: int) -> None:
    """Progress that nobody watches."""
