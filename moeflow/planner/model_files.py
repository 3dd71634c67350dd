"""Models to plan for: with weights, or known by a bare `config.json` alone. Some of these are shipped by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ModelConfig
from moeflow.models.registry import read_bare_config, read_model_config

_SHIPPED = Path(__file__).parent / "models"
_SUFFIX: Final = ".json"


def shipped_models() -> Mapping[str, Path]:
    """Return the file of each shipped shape by its name."""
    found = {file.name.removesuffix(_SUFFIX): file for file in _SHIPPED.iterdir()}
    return {name: file for name, file in sorted(found.items()) if file.suffix == _SUFFIX}


def bare_config(model: str) -> Path | None:
    """Return the file that has a model's shape without weights; None if the model is a checkpoint."""
    return shipped_models().get(model) or (Path(model) if model.endswith(_SUFFIX) else None)


@contextmanager
def opened_model(model: str, *, needs_weights: bool) -> Iterator[tuple[Checkpoint | None, ModelConfig]]:
    """Yield a model and its shape; unless it `needs_weights`, a shape alone will do.

    Raises: CheckpointError, which then names such shapes.
    """
    if needs_weights:
        with closing(open_checkpoint(model)) as checkpoint:
            yield checkpoint, read_model_config(checkpoint)
        return
    if bare_config(model) is not None:
        yield None, read_bare_config(shipped_models().get(model) or Path(model))
        return
    try:
        checkpoint = open_checkpoint(model)
    except CheckpointError as error:
        path, remedy = Path(model), error.remedy
        if (path / "config.json").is_file():
            remedy += f"; to plan for its shape alone, use `moeflow plan {path / 'config.json'} --machine NAME`"
        elif not path.exists():
            remedy += f"; shapes that can be planned for without weights are {', '.join(shipped_models())}"
        raise CheckpointError(error.problem, file=error.file, tensor=error.tensor, remedy=remedy) from None
    with closing(checkpoint):
        yield checkpoint, read_model_config(checkpoint)


def path_in_plan(model: str) -> str:
    """Return a plan's name of a model: a shipped shape's name, or a path that holds in any folder."""
    return model if model in shipped_models() else str(Path(model).absolute())
