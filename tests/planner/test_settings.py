"""What a user says is looked at before anything is read."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.experts.cache.policies import DEFAULT_POLICY, POLICIES
from moeflow.experts.predict.registry import DEFAULT_PREDICTOR, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.planner.settings import Settings, options


@pytest.mark.parametrize(
    "name",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_threads",
        "num_ranks",
        "num_redundant_experts",
        "num_replicas",
        "max_model_len",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_are_at_least_one(name, value):
    Settings().check_counts()
    Settings(**{name: 1}).check_counts()
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {value}"):
        Settings(**{name: value}).check_counts()


def test_the_choices_are_the_policies_and_predictors_that_there_are():
    """They are written out in the settings, so that the command line's help needs no numpy."""
    choices = {option.flag: option.choices for option in options().values()}
    assert choices["--expert-policy"] == ("auto", *POLICIES)
    assert choices["--predictor"] == ("auto", *PREDICTORS, WHOLE_PASS, NO_PREDICTOR)
    assert DEFAULT_POLICY in POLICIES
    assert DEFAULT_PREDICTOR in PREDICTORS
