"""Settings of a machine that computes for a server, and the server's configuration with these."""

from __future__ import annotations

import dataclasses
import socket
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from moeflow.checkpoint.identity import fingerprint_of
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.reader import OnBytes
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError, HubError, MoeflowError
from moeflow.engine.ranks.own_model import OnStep, bring_own_model, find_own_model
from moeflow.models.packing import slab_spec
from moeflow.planner.choices.packed_files import (
    ensure_packed_weights_file,
    find_packed_weights_file,
    formats_of,
    place_of_packed_weights,
)
from moeflow.planner.choices.prompt_cache_choice import default_prompt_folder
from moeflow.planner.hardware.host import host_resources


class LeftError(MoeflowError):
    """A signal has ended the part of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """Settings of this machine's user, or of an order from Ray."""

    host: str  # of the server
    port: int
    token: bytes
    model: str | None = None  # None: the server's, see `own_model.py`
    num_threads: int | None = None  # None: one a core
    cpu_isa: str = ""  # the best instruction set to use; empty: the best there is
    cache_dir: Path | None = None  # where packed weights may be
    group: str = ""  # the ranks of an engine are of one group

    @property
    def threads(self) -> int:
        """Threads that compute here."""
        return self.num_threads or host_resources().num_cores


def checked_config(config: EngineConfig, fingerprint: str, settings: JoinSettings, on_step: OnStep) -> EngineConfig:
    """Return the server's configuration with this machine's paths and threads, after bringing its model here.

    `on_step` gets the progress, and may raise to stop it. Blocks: on the network and the disk, perhaps for long.
    Raises: CheckpointError if there is no such checkpoint; ConfigError if it is another one; HubError, CapacityError.
    """
    cache_dir, name = settings.cache_dir, socket.gethostname()
    try:
        path = settings.model or find_own_model(config.model_path, cache_dir)
        path = path or bring_own_model(config.model_path, cache_dir, on_step)
        if fingerprint_of(path) != fingerprint:
            raise ConfigError(f"{path} on {name} is not the server's checkpoint: copy that one there")
        has_all = config.parallel is None  # the model, which a rank has a part of
        on_packed = partial(on_step, "packing the model") if has_all else None
        return own_config(config, path, settings, on_packed)
    except CheckpointError as error:
        where = settings.model or config.model_path
        remedy = f"copy it to {where} on {name}, or share the folder"
        raise CheckpointError(f"{name} has no such checkpoint: {error}", remedy=remedy) from None
    except (HubError, CapacityError) as error:
        raise type(error)(f"{name} cannot get {config.model_path}: {error}") from None


def own_config(
    config: EngineConfig, model: str, settings: JoinSettings, on_packed: OnBytes | None = None
) -> EngineConfig:
    """Return the other machine's configuration with this one's paths and threads, and this one's path of the model.

    Packed weights in the cache folder are used. With `on_packed`, and if the server's are packed, they are made.
    Raises: CheckpointError; as `pack_model`.
    """
    own = dataclasses.replace(
        config,
        model_path=model,
        packed_file="",
        num_threads=settings.threads,
    )
    with closing(open_checkpoint(model)) as checkpoint:
        spec = slab_spec(checkpoint, formats_of(config))
        packed = find_packed_weights_file(checkpoint, spec, None, settings.cache_dir)
        if packed is None and config.packed_file and on_packed is not None:
            place = place_of_packed_weights(checkpoint, spec, None, settings.cache_dir)
            packed = ensure_packed_weights_file(checkpoint, place, own, on_packed).path
        if config.experts is not None:  # the engine packs them if they are not there
            place = place_of_packed_weights(checkpoint, spec, None, settings.cache_dir)
            own = dataclasses.replace(own, experts=dataclasses.replace(config.experts, packed_weights_file=str(place)))
    if config.prompt_cache is not None and not Path(config.prompt_cache.folder).is_dir():
        folder = str(default_prompt_folder(settings.cache_dir).absolute())
        own = dataclasses.replace(own, prompt_cache=msgspec.structs.replace(config.prompt_cache, folder=folder))
    return own if packed is None else dataclasses.replace(own, packed_file=str(packed))
