"""Where a machine that joins has the server's model: at the server's path, or in a cache of its own that it fills.

A model from a hub is pulled at the same commit. The built-in model is made. Users copy or share all others: the
server's connections carry tokens, which gigabytes would delay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from moeflow.checkpoint.hub.local_models import find_model, hub_cache
from moeflow.checkpoint.hub.pull import pull
from moeflow.checkpoint.identity import pulled_model
from moeflow.core.apart import run_apart
from moeflow.core.cache_dir import cache_folder
from moeflow.core.errors import CapacityError, ConfigError

OnStep = Callable[[str, int, int], None]  # the step, its parts done and in all

_BUILTIN: Final = "builtin-"  # begins the folder of the built-in model: see train/builtin.py
_MAKER: Final = "moeflow.train.making_process"  # a process of its own, which may import what this folder may not
_TENTHS: Final = 10


class _Made(msgspec.Struct, frozen=True):
    """A report of that process."""

    done: int = 0
    total: int = 0
    error: str = ""


def find_own_model(server_path: str, cache_dir: Path | None) -> str | None:
    """Return where this machine has the model of a path on the server's. None: `bring_own_model` can bring it.

    The path is the server's own if there is no other. Raises: CheckpointError if the cache has several such models.
    """
    name, built_in = pulled_model(Path(server_path)), _builtin_place(server_path, cache_dir)
    if name is not None and (found := find_model(name, hub_cache())) is not None:
        return str(found)
    if built_in is not None and built_in.is_dir():
        return str(built_in)
    can_bring = name is not None or built_in is not None
    return None if can_bring and not os.path.lexists(server_path) else server_path


def bring_own_model(server_path: str, cache_dir: Path | None, on_step: OnStep) -> str:
    """Pull or make the model of a path on the server's machine; return its path here. Blocks: on the network.

    `on_step` may raise to stop it. Raises: HubError, CheckpointError, CapacityError; ConfigError if it has no name.
    """
    name, built_in = pulled_model(Path(server_path)), _builtin_place(server_path, cache_dir)
    if name is not None:
        step = f"pulling {name}"
        return str(pull(name, hub_cache(), lambda done, total: on_step(step, done, total)))
    if built_in is None:
        raise ConfigError(f"{server_path} has no name on a hub: copy it to this machine, or share its folder")
    with suppress(ChildProcessError):  # then there is no folder
        for line in run_apart(_MAKER, str(cache_folder(cache_dir).absolute()).encode()):
            report = msgspec.json.decode(line, type=_Made)
            if report.error:
                raise ConfigError(report.error)
            on_step("making the built-in model", report.done, report.total)
    if not built_in.is_dir():
        raise CapacityError(f"the built-in model could not be made at {built_in}: free memory and disk, then try again")
    return str(built_in)


def _builtin_place(server_path: str, cache_dir: Path | None) -> Path | None:
    """Return where the built-in model is, or would be made; None: the path is that of another one."""
    path = Path(server_path)
    is_built_in = path.parent.name.startswith(_BUILTIN)
    return cache_folder(cache_dir) / path.parent.name / path.name if is_built_in else None


def in_tenths(on_news: Callable[[str], None]) -> OnStep:
    """Return what reports steps in words, each at its start and at every tenth."""
    last: tuple[str, int] | None = None

    def report(step: str, done: int, total: int) -> None:
        nonlocal last
        tenth = _TENTHS * done // max(total, 1)
        if (step, tenth) != last:
            last = (step, tenth)
            on_news(f"{step}: {tenth * 100 // _TENTHS}%")

    return report
