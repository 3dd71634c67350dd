"""--model, several times: the models of one server, what each is called, and how each is planned.

Names are checked before anything is served or explained: each is another one, and each model is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.cli.local_model import explain, fetch_if_named, planned
from moeflow.core.errors import MoeflowError
from moeflow.core.units import format_bytes
from moeflow.planner.usage import SERVING
from moeflow.settings.settings import options, written_files

if TYPE_CHECKING:
    from moeflow.core.plan import Plan
    from moeflow.planner.hardware.host import HostResources
    from moeflow.server.config import ServerConfig
    from moeflow.server.launch import PlanMore, PlannedModel


def named_paths(models: Sequence[str], *, pulls: bool) -> dict[str, str]:
    """Return the absolute path of each model by the name that requests give.

    Each is a path or the name of a pulled model, perhaps with a name before it: NAME=PATH.

    Raises: CheckpointError if one is not downloaded; UsageError if two have one name.
    """
    found: dict[str, str] = {}
    for given in models:
        name, model = split_name(given)
        if pulls:
            fetch_if_named(model)
        path = os.path.abspath(lazy.local_path(model))
        name = name or lazy.called(Path(path))
        if not os.path.exists(path):
            raise click.UsageError(f"there is no model at {model!r}")
        if name in found:
            raise click.UsageError(f"two models are called {name!r}: give one another name, NAME={model}")
        found[name] = path
    return found


def chosen_models(model: str | None, models: tuple[str, ...]) -> list[str]:
    """Return MODEL and each --model; what the command line names goes before what a configuration file does."""
    ctx = click.get_current_context()
    sources = {name: ctx.get_parameter_source(name) for name in ("model", "models")}
    if click.core.ParameterSource.COMMANDLINE in sources.values():
        model = model if sources["model"] is click.core.ParameterSource.COMMANDLINE else None
        models = models if sources["models"] is click.core.ParameterSource.COMMANDLINE else ()
    return [*([model] if model is not None else []), *models]


def split_name(given: str) -> tuple[str, str]:
    """Return the name, empty if none is given, and the model: what exists as a whole is a path."""
    name, separator, model = given.partition("=")
    return (name, model) if separator and name and not os.path.lexists(given) else ("", given)


@dataclass(frozen=True, slots=True)
class SeveralModels:
    """Models that one server has, within one budget of memory."""

    models: dict[str, PlannedModel]  # by the name that requests give
    budget_bytes: int  # that the user set, or that this machine has now
    plan_more: PlanMore | None = None  # for models that are added while the server runs

    @classmethod
    def of(cls, overrides: dict[str, Any], paths: dict[str, str]) -> SeveralModels:
        """Return the models of these paths, each planned as the user set. Raises: UsageError."""
        of_one = {name: options()[name].flag for name in ("packed_weights_file", *written_files())}
        if given := [flag for name, flag in {"plan_file": "--plan", **of_one}.items() if overrides.get(name)]:
            raise click.UsageError(f"{given[0]} is for one model: leave it out, or serve one")
        resources = lazy.host_resources(overrides.get("device", "auto"), overrides.get("cache_dir"))

        def planned_model(name: str, path: str) -> tuple[str, PlannedModel]:
            own = {**overrides, "model": path, "model_name": name}
            model = lazy.PlannedModel(path, _planner(own, resources), overrides.get("max_model_len"))
            return lazy.served_name(name, overrides), model

        models = dict(planned_model(name, path) for name, path in paths.items())
        return cls(models, overrides.get("memory_bytes") or resources.available_bytes, planned_model)

    def serve(self, config: ServerConfig) -> int:
        """Serve them; return the exit code. Blocks: until a signal ends it."""
        return lazy.serve_several(self.models, self.budget_bytes, config, self.plan_more)

    def explain(self) -> int:
        """Print what would be chosen for each, and whether all fit; return the exit code: 1 if one cannot be planned.

        That one is named with the reason, and the others are explained, as they would be served.
        """
        num_bytes: list[int] = []  # of the models that can be planned
        for name, model in self.models.items():
            click.echo(f"{name}: {model.path}")
            try:
                plan = model.plan()
            except MoeflowError as error:
                click.echo(f"error: {name} cannot be planned: {error}", err=True)
                continue
            explain(plan)
            num_bytes.append(min(plan.memory_bytes or self.budget_bytes, self.budget_bytes))
        if len(num_bytes) > 1:
            click.echo(self._together(sum(num_bytes)))
        return int(len(num_bytes) < len(self.models))

    def _together(self, num_bytes: int) -> str:
        need, have = format_bytes(num_bytes), format_bytes(self.budget_bytes)
        if num_bytes <= self.budget_bytes:
            return f"Together they hold {need} of the {have} that they share: all can be loaded at once."
        return f"Together they would hold {need}, and share {have}: those that are idle make room for others."


def _planner(overrides: dict[str, Any], resources: HostResources) -> Callable[[], Plan]:
    return lambda: planned(overrides, SERVING, resources=resources, is_served=True, shares_memory=True)
