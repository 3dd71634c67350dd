"""A hub of our own, which the hub library takes for the real one, and an empty cache."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.checkpoint.hub.hub_server import hub_of_this_process


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch, cache):
    with hub_of_this_process(monkeypatch, cache) as hub:
        yield hub
