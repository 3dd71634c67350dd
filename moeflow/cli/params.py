"""The types of arguments that name a model, with their completion in shells, and of options that name an output file. A
path that cannot be written is refused before the work begins.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from click import shell_completion


class NewFile(click.Path):
    """A path whose folder exists and may be written to; an existing file may be, too."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises: click.BadParameter if nothing can be written there."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = (path.resolve() if path.is_symlink() else path).parent
        if not folder.is_dir():
            self.fail(f"folder {str(folder)!r} does not exist; make it, or name another place", param, ctx)
        if not os.access(folder, os.W_OK):
            self.fail(f"folder {str(folder)!r} is not writable; name another place", param, ctx)
        return path


class NewPicture(click.Path):
    """A path that ends in .png; its folder is made with it. Needs matplotlib."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises: click.BadParameter if it names no PNG; ClickException without matplotlib."""
        require_matplotlib()
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix.lower() != ".png":
            self.fail(f"{str(path)!r} does not end in .png, the only supported format", param, ctx)
        return path


class ModelPath(click.Path):
    """A model that is there: its path, or the name of one that was pulled."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises: click.BadParameter if there is none, CheckpointError if no such model was pulled."""
        return super().convert(lazy.local_path(os.fsdecode(value)), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[shell_completion.CompletionItem]:
        """See `complete_model`."""
        return complete_model(ctx, param, incomplete)


def complete_model(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[shell_completion.CompletionItem]:
    """Return what the name of a model may go on with: pulled models, or a path, which the shell knows better."""
    try:
        names = [str(model.name) for model in lazy.cached_models(lazy.hub_cache())]
    except OSError:  # such a warning would interrupt a line
        names = []
    paths = shell_completion.CompletionItem(incomplete, type="file")  # goes first: bash forgets what came before it
    return [paths, *(shell_completion.CompletionItem(name) for name in names if name.startswith(incomplete))]


def require_matplotlib() -> None:
    """Raises: ClickException if there is none, before anything is computed in vain."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("pictures need matplotlib: pip install 'moeflow[bench]'")


NEW_FILE = NewFile()
MODEL_PATH = ModelPath()
NEW_PICTURE = NewPicture()
