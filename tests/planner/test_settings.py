"""What a user says is looked at before anything is read."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.planner.settings import Settings


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "num_threads", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_are_at_least_one(name, value):
    Settings().check_counts()
    Settings(**{name: 1}).check_counts()
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {value}"):
        Settings(**{name: value}).check_counts()
