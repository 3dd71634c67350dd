"""A predictor as a folder: `predictor.safetensors`, and `predictor.json` with its sizes and whose routers taught it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.models.expert_predictor.network import ExpertPredictor

with on_demand(__name__):
    import safetensors
    from safetensors import torch as tensor_files

    from moeflow.models.expert_predictor import network

FORMAT_VERSION: Final = 1
REMEDY: Final = "Train it with `moeflow train predictor`"
_WEIGHTS, _DESCRIPTION = "predictor.safetensors", "predictor.json"


def predictor_folder(model: Path) -> Path:
    """Return where the predictor of a model lies: in its folder, or beside its file."""
    return model.with_name(f"{model.name}.predictor") if model.is_file() else model / "predictor"


def decoder_folder(folder: Path) -> Path:
    """Return the path of the predictor of the decoder's layers, next to the encoder's."""
    return folder / "decoder"


def is_saved(folder: Path) -> bool:
    """Whether there is a whole predictor: weights, and their description, which is written last."""
    return (folder / _WEIGHTS).is_file() and (folder / _DESCRIPTION).is_file()


def check_is_saved(folders: Sequence[Path], otherwise: str) -> None:
    """Raise ConfigError if none of these is a predictor; `otherwise` is what to do then instead of training one."""
    if not any(map(is_saved, folders)):
        raise ConfigError(f"there is no predictor of this model's experts in {folders[0]}. {REMEDY}, or {otherwise}")


def carried_folder(packed_file: Path) -> Path:
    """Return where `moeflow pack` leaves the predictor of a model beside its packed weights."""
    return packed_file.with_name(f"{packed_file.name}.predictor")


def folders_of(model: Path, packed_file: Path | None = None) -> tuple[Path, Path]:
    """Return where the predictor of a model lies, of an encoder-decoder that of its encoder; and of its decoder.

    That is next to the model, or else next to its packed weights.
    """
    places = [predictor_folder(model), *([] if packed_file is None else [carried_folder(packed_file)])]
    pairs = [(folder, decoder_folder(folder)) for folder in places]
    return next((pair for pair in pairs if any(map(is_saved, pair))), pairs[0])


def needed_folders(folders: tuple[Path, Path], shape: ModelConfig) -> list[Path]:
    """Return which of `folders_of` have to be there, so that all layers with experts have a predictor."""
    if shape.encoder is None:
        return [folders[0]]
    counts = (shape.num_encoder_moe_layers, shape.num_moe_layers - shape.num_encoder_moe_layers)
    return [folder for folder, count in zip(folders, counts, strict=True) if count]


def predictor_bytes(model: Path, packed_file: Path | None) -> int:
    """Return what the weights of a model's predictors take, in files and in memory alike: float32. 0: there is none."""
    return sum((folder / _WEIGHTS).stat().st_size for folder in folders_of(model, packed_file) if is_saved(folder))


def carry_predictor(target: Checkpoint, packed_file: Path) -> Path | None:
    """Copy the predictors of a model to beside its packed weights; return where they lie. None: there is none.

    Raises: CheckpointError if one is damaged or another model's; ConfigError if the folder cannot be written to.
    """
    carried = carried_folder(packed_file)
    own = folders_of(target.path)
    for folder, copy in zip(own, (carried, decoder_folder(carried)), strict=True):
        if is_saved(folder):
            predictor = load_predictor(folder, target)
            save_predictor(predictor, target, copy, read_json_object(folder / _DESCRIPTION)["measured"])
    return carried if any(map(is_saved, own)) else None


def save_predictor(predictor: ExpertPredictor, target: Checkpoint, folder: Path, measured: dict[str, Any]) -> None:
    """Write a predictor with its measurements.

    Raises: ConfigError if the folder cannot be written to.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "fingerprint": content_fingerprint(target),
        "shape": asdict(predictor.shape),
        "measured": measured,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _DESCRIPTION).unlink(missing_ok=True)
        unfinished = folder / "predictor.unfinished"
        tensor_files.save_file(
            {name: tensor.contiguous() for name, tensor in predictor.state_dict().items()}, unfinished
        )
        unfinished.rename(folder / _WEIGHTS)
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(folder / _DESCRIPTION)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Choose another place (--out)") from error


def load_predictor(folder: Path, target: Checkpoint) -> ExpertPredictor:
    """Return the predictor of a model. Raises: CheckpointError if there is none, or a damaged one or another's."""
    file = folder / _DESCRIPTION
    if not is_saved(folder):
        raise CheckpointError("there is no predictor of this model's experts", file=file, remedy=REMEDY)
    content = read_json_object(file)
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError("is of a version that this moeflow does not know", file=file, remedy=REMEDY)
    if content.get("fingerprint") != content_fingerprint(target):
        raise CheckpointError(f"belongs to another model than {target.path}", file=file, remedy=REMEDY)
    try:
        predictor = network.ExpertPredictor(network.PredictorShape(**content["shape"]))
        predictor.load_state_dict(tensor_files.load_file(folder / _WEIGHTS))
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot be read ({error})", file=folder / _WEIGHTS, remedy=REMEDY) from error
    return predictor.eval().requires_grad_(False)
