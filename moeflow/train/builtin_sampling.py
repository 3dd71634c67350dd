"""How the built-in model is sampled: defaults in its `generation_config.json`.

A model this small answers best near its likeliest tokens, and repeats itself without a penalty. Models that an earlier
version made get the defaults when they are next used: they need not be made again.
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
    """Write the defaults that the folder's file lacks; values that stand there stay.

    Raises: CheckpointError if the file is damaged.
    """
    file = folder / "generation_config.json"
    content = read_json_object(file) if file.exists() else {}
    complete = BUILTIN_SAMPLING.changes() | content
    if complete == content:
        return
    new = file.with_name(f".{file.name}.{os.getpid()}")  # renamed when complete: others may read meanwhile
    try:
        write_json(new, complete)
        os.replace(new, file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        logger.warning("the built-in model's sampling defaults could not be written into %s: %s", file, error)
