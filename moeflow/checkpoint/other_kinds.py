"""Kinds of models that are often mistaken for language models in Hugging Face form: each is refused by its name.

Files or tensors tell the kind before the weights are looked at, so the error names the kind and not a missing tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

_ADAPTER_FILE: Final = "adapter_config.json"
_PIPELINE_FILE: Final = "model_index.json"
_PIPELINE_PART: Final = "diffusion_pytorch_model"  # how the names of a part's weights begin
_LANGUAGE_MODEL: Final = "Take a language model: moeflow makes text, and vectors of text"
_BIASES, _SCALES = ".biases", ".scales"  # of MLX's quantized matrices, beside their integers
_MLX_EXPERTS: Final = ".switch_mlp."  # how MLX names stacked experts


def refuse_other_files(paths: Collection[str], where: Path | str) -> None:
    """Refuse a folder or repository whose file names show another kind of model. Raises: CheckpointError."""
    if _ADAPTER_FILE in paths:
        raise _adapter(where, "its base model")
    if _PIPELINE_FILE in paths:
        raise CheckpointError("holds a diffusers pipeline, no language model", file=where, remedy=_LANGUAGE_MODEL)
    if any(path.startswith(_PIPELINE_PART) for path in paths):
        raise CheckpointError("holds a part of a diffusers pipeline", file=where, remedy=_LANGUAGE_MODEL)


def refuse_other_folder(folder: Path) -> None:
    """Do the same for a folder on this machine; the base model of an adapter is named."""
    names = [entry.name for entry in folder.iterdir()]
    if _ADAPTER_FILE in names:
        base = read_json_object(folder / _ADAPTER_FILE).get("base_model_name_or_path")
        raise _adapter(
            folder, f"its base model ({truncated_repr(base)})" if isinstance(base, str) else "its base model"
        )
    refuse_other_files(names, folder)


def refuse_other_config(config: Mapping[str, Any], where: Path | str) -> None:
    """Refuse a config.json of weights quantized for MLX. Raises: CheckpointError."""
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and quantization.keys() >= {"bits", "group_size"}:
        bits, group_size = (truncated_repr(quantization[key]) for key in ("bits", "group_size"))
        raise _mlx(f"holds weights that are quantized for MLX ({bits} bits, groups of {group_size})", where)


def refuse_other_tensors(names: Collection[str], folder: Path) -> None:
    """Refuse weights in MLX's form by their names. Raises: CheckpointError."""
    if any(name.endswith(_BIASES) and name.removesuffix(_BIASES) + _SCALES in names for name in names):
        raise _mlx("holds weights that are quantized for MLX", folder)
    if any(_MLX_EXPERTS in name for name in names):
        raise _mlx("holds weights in MLX's form", folder)


def _mlx(problem: str, where: Path | str) -> CheckpointError:
    return CheckpointError(
        problem,
        file=where,
        remedy="Take the Hugging Face model that they were converted from (their model card names it), or a GGUF file",
    )


def _adapter(where: Path | str, base: str) -> CheckpointError:
    return CheckpointError(
        f"holds an adapter (LoRA) for {base}, no whole model",
        file=where,
        remedy="Merge the two: peft's AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
        ".save_pretrained(NEW_FOLDER); tokenizer files are copied from the base model",
    )
