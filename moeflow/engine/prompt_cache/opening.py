"""From a configuration to an engine's prompt cache."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from moeflow.core.engine_config import EngineConfig
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.prompt_cache.identity import kv_identity
from moeflow.engine.prompt_cache.prompt_cache import PromptCache
from moeflow.engine.prompt_cache.state_files import StateFiles
from moeflow.kv.disk.block_keys import state_identity
from moeflow.kv.disk.extent_folder import ExtentFolder

logger = logging.getLogger(__name__)


def open_prompt_cache(config: EngineConfig, runner: ModelRunner) -> PromptCache | None:
    """Return the prompt cache that a loaded engine is configured to have; None if its folder is of no use.

    Raises: CheckpointError.
    """
    assert config.prompt_cache is not None
    assert runner.kv.is_in_main_memory, "the planner takes it for nothing else"
    identity = kv_identity(config)
    states = runner.kv.states
    open_folder = partial(
        ExtentFolder,
        Path(config.prompt_cache.folder),
        max_bytes=config.prompt_cache.max_bytes,
    )
    try:
        folder = open_folder(model=config.model_name, identity=identity, block_bytes=runner.kv.content_bytes)
        state_files = None
        if states is not None:
            name = f"{config.model_name}, recurrent states"
            state_folder = open_folder(model=name, identity=state_identity(identity), block_bytes=states.layer_bytes)
            state_files = StateFiles(state_folder, states)
    except OSError as error:
        logger.warning("there is no prompt cache: %s", error)
        return None
    return PromptCache(folder, runner.kv, identity, runner.make_room, states=state_files)
