"""Whether keys and values of prompts are kept on disk, where, and how much of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from moeflow.core.cache_dir import cache_folder, existing_folder
from moeflow.core.engine_config import BLOCK_SIZE, PromptCacheConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.recurrent_config import STATE_BYTES
from moeflow.core.units import GIB, MIB, format_bytes
from moeflow.kv.disk.own_files import distrust
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import Settings

DEFAULT_BYTES: Final = 8 * GIB
PIECE_BYTES: Final = 4 * MIB  # that are read or written at once, unless a block, or a layer's state, is larger


def choose_prompt_cache(
    settings: Settings, shape: ModelConfig, *, cpu_isa: str, shares_layers: bool, reasons: Reasons
) -> PromptCacheConfig | None:
    """Return what the user asked for; None: nothing. Raises: ConfigError where it cannot be, or not in that folder."""
    if not _is_asked(settings):
        return None
    obstacles = {
        "prefixes are not shared (--no-prefix-caching, --capacity-factor)": not settings.prefix_caching,
        f"keys and values of a {shape.model_type} model depend on all of a text": shape.encoder is not None,
        f"no layer of a {shape.model_type} model has keys and values": not shape.kv_layers,
        "the CPU's kernels do not compute, whose results alone are the same every time": not cpu_isa,
        "ranks (--ranks, --stages) have a part of the keys and values each": shares_layers,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ConfigError(f"prompts are not kept on disk (--prompt-cache) where {obstacle}: remove one of them")
    folder = (settings.prompt_cache or default_prompt_folder(settings.cache_dir)).absolute()
    _check(folder)
    max_bytes = settings.prompt_cache_bytes or DEFAULT_BYTES
    reasons.append(("prompt_cache", f"{folder}, up to {format_bytes(max_bytes)}"))
    return PromptCacheConfig(folder=str(folder), max_bytes=max_bytes)


def default_prompt_folder(cache_dir: Path | None) -> Path:
    """Return the default folder of prompts."""
    return cache_folder(cache_dir) / "prompts"


def buffer_bytes(settings: Settings, shape: ModelConfig) -> int:
    """Return what two buffers between KV blocks and disk take, if there are any."""
    block_bytes = int(shape.kv_bytes_per_token("float32") * BLOCK_SIZE)
    state_bytes = 0 if shape.recurrent is None else shape.recurrent.mixer.state_values * STATE_BYTES
    return 2 * max(PIECE_BYTES, block_bytes, state_bytes) if _is_asked(settings) else 0


def _is_asked(settings: Settings) -> bool:
    return settings.prompt_cache is not None or settings.prompt_cache_bytes is not None


def _check(folder: Path) -> None:
    """Raise ConfigError if the folder could not be made or written, or is not this user's alone."""
    existing = existing_folder(folder)
    why = None
    if existing == folder:
        why = distrust(folder)
    elif not existing.is_dir():
        why = "is no folder"
    if why is None and not os.access(existing, os.W_OK):
        why = "cannot be written"
    if why is not None:
        raise ConfigError(
            f"{existing} {why}, so prompts cannot be kept in it: make it a folder that only you can write (chmod 700), "
            "or name another (--prompt-cache)"
        )
