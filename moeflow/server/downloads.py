"""Models in the hub's cache as a server meets them: which are there, and how one comes to be served."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from moeflow.checkpoint.hub.cached_models import cached_models, unfinished_bytes
from moeflow.checkpoint.hub.local_models import find_model, hub_cache
from moeflow.checkpoint.hub.model_name import ModelName, parse_model_name
from moeflow.checkpoint.identity import pulled_model
from moeflow.core.cache_dir import existing_folder
from moeflow.core.errors import CheckpointError
from moeflow.models.downloaded import DownloadedModel, describe
from moeflow.server.errors import ApiError
from moeflow.server.model_pool import ModelPool
from moeflow.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Downloads:
    """What the hub's cache has."""

    models: list[DownloadedModel]
    unfinished_bytes: dict[str, int]  # of each repository with an interrupted pull
    free_bytes: int  # of the disk


def read_downloads() -> Downloads:
    """Return what the hub's cache has now. Blocks: on the headers of all models."""
    cache = hub_cache()
    models = [describe(model) for model in cached_models(cache)]
    return Downloads(models, unfinished_bytes(cache), shutil.disk_usage(existing_folder(cache)).free)


async def served_or_downloaded(pool: ModelPool, name: str) -> ServedModel:
    """Return the model of that name, which is added to the served ones if it is only downloaded.

    Raises: ApiError 404 if there is none, and as `ModelPool.add`.
    """
    try:
        return pool.find(name)
    except ApiError as error:
        parsed = parse_model_name(name)
        path = None if parsed is None else await asyncio.to_thread(_find, parsed)
        if parsed is None or path is None:
            raise error
        return add_downloaded(pool, parsed, str(path))


def add_downloaded(pool: ModelPool, name: ModelName, path: str) -> ServedModel:
    """Have a downloaded model served, by its name on the hub. Raises: as `ModelPool.add`."""
    found = pulled_model(Path(path))
    full = name if found is None else replace(found, revision=name.revision)
    return pool.add(str(full), os.path.abspath(path))


def _find(name: ModelName) -> Path | None:
    try:
        return find_model(name, hub_cache())
    except CheckpointError as error:  # it fits several files
        raise ApiError(400, "invalid_value", str(error), param="model") from None
