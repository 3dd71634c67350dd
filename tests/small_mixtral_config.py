"""A small model to simulate."""

from __future__ import annotations

import json

import pytest

from moeflow.planner.model_files import shipped_models

SMALL = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1000}


@pytest.fixture
def model(tmp_path):
    """A config.json of a small Mixtral."""
    raw = json.loads(shipped_models()["mixtral-8x7b"].read_text()) | SMALL
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    return str(file)
