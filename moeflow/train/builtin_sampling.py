"""Sampling defaults of the built-in model, in its `generation_config.json`.

So small a model answers best with a low temperature and a repetition penalty. An existing model without the defaults
gets them at its next use.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from moeflow.checkpoint.json_file import read_json_object
from moeflow.checkpoint.safetensors.writer import write_json
from moeflow.core.token_choice import TokenChoice

logger = logging.getLogger(__name__)

BUILTIN_SAMPLING: Final = TokenChoice(temperature=0.2, top_p=0.9, repetition_penalty=1.1)


def add_sampling_defaults(folder: Path) -> None:
    """Add the missing defaults to the folder's file.

    Raises: CheckpointError if the file is damaged.
    """
    file = folder / "generation_config.json"
    content = read_json_object(file) if file.exists() else {}
    complete = BUILTIN_SAMPLING.changes() | content
    if complete == content:
        return
    new = file.with_name(f".{file.name}.{os.getpid()}")  # renamed when complete, since others may read
    try:
        write_json(new, complete)
        os.replace(new, file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        logger.warning("the built-in model's sampling defaults could not be written into %s: %s", file, error)
