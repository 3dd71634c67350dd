"""--model, several times: the models of one server, what each is called, and how each is planned.

Names are checked before anything is served: each is another one, and each model is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.cli.local_model import fetch_if_named, planned
from moeflow.planner.settings import options, written_files
from moeflow.planner.usage import SERVING

if TYPE_CHECKING:
    from moeflow.core.plan import Plan
    from moeflow.planner.hardware.host import HostResources
    from moeflow.server.config import ServerConfig


def named_paths(models: Sequence[str], *, pulls: bool) -> dict[str, str]:
    """Return the absolute path of each model by the name that requests give.

    Each is a path or the name of a pulled model, perhaps with a name before it: NAME=PATH.

    Raises: CheckpointError if one is not here; UsageError if two have one name.
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


def serve_all(overrides: dict[str, Any], paths: dict[str, str], config: ServerConfig) -> int:
    """Serve these models, in the memory that the user set or that this machine has now; return the exit code."""
    of_one = {name: options()[name].flag for name in ("packed_weights_file", *written_files())}
    if given := [flag for name, flag in {"plan_file": "--plan", **of_one}.items() if overrides.get(name)]:
        raise click.UsageError(f"{given[0]} is for one model: leave it out, or serve one")
    resources = lazy.host_resources()
    models = {}
    for name, path in paths.items():
        own = {**overrides, "model": path, "model_name": name}
        served = lazy.served_name(name, lazy.Settings(lossy_routing=overrides["lossy_routing"]))
        models[served] = lazy.PlannedModel(path, _planner(own, resources))
    budget_bytes = overrides["memory_bytes"] or resources.available_bytes
    return lazy.serve_several(models, budget_bytes, config)


def _planner(overrides: dict[str, Any], resources: HostResources) -> Callable[[], Plan]:
    return lambda: planned(overrides, SERVING, resources=resources, is_served=True, shares_memory=True)
