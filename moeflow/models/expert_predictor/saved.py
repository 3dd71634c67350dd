"""A predictor as a folder: `predictor.safetensors`, and `predictor.json` with its sizes and whose routers taught it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape

FORMAT_VERSION: Final = 1
REMEDY: Final = "Train it with `moeflow train predictor`"
_WEIGHTS, _DESCRIPTION = "predictor.safetensors", "predictor.json"


@dataclass(frozen=True, slots=True)
class SavedPredictor:
    """What a folder holds."""

    shape: PredictorShape
    fingerprint: str  # of the model


def predictor_folder(model: Path) -> Path:
    """Return where the predictor of a model lies: in its folder, or beside its file."""
    return model.with_name(f"{model.name}.predictor") if model.is_file() else model / "predictor"


def is_saved(folder: Path) -> bool:
    """Whether there is a whole predictor: the description is written last."""
    return (folder / _DESCRIPTION).is_file()


def check_is_saved(folder: Path, otherwise: str) -> None:
    """Raise ConfigError if there is no predictor; `otherwise` is what to do then instead of training one."""
    if not is_saved(folder):
        raise ConfigError(f"there is no predictor of this model's experts in {folder}. {REMEDY}, or {otherwise}")


def predictor_bytes(folder: Path) -> int:
    """Return what a predictor's weights take, in a file and in memory alike: float32. 0: there is none."""
    return (folder / _WEIGHTS).stat().st_size if is_saved(folder) else 0


def save_predictor(predictor: ExpertPredictor, target: Checkpoint, folder: Path, measured: dict[str, Any]) -> None:
    """Write a predictor, and what was measured of it, for whoever reads the file.

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
        save_file({name: tensor.contiguous() for name, tensor in predictor.state_dict().items()}, unfinished)
        unfinished.rename(folder / _WEIGHTS)
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(folder / _DESCRIPTION)
    except (OSError, SafetensorError) as error:
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
        predictor = ExpertPredictor(PredictorShape(**content["shape"]))
        predictor.load_state_dict(load_file(folder / _WEIGHTS))
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read ({error})", file=folder / _WEIGHTS, remedy=REMEDY) from error
    return predictor.eval().requires_grad_(False)
