"""What a user says is looked at before anything is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moeflow.core.errors import ConfigError
from moeflow.experts.cache.policies import DEFAULT_POLICY, POLICIES
from moeflow.experts.predict.registry import DEFAULT_PREDICTOR, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.settings.settings import Settings, from_plain, options, to_plain


@pytest.mark.parametrize(
    "name",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_threads",
        "num_ranks",
        "num_redundant_experts",
        "num_replicas",
        "max_replicas",
        "max_model_len",
        "micro_batch",
        "prompt_micro_batch",
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


def test_settings_depend_on_others_that_there_are():
    fields = {field.name: field.metadata.get("depends_on", ()) for field in dataclasses.fields(Settings)}
    assert {name for depends_on in fields.values() for name in depends_on} <= set(fields)
    assert not [name for name, depends_on in fields.items() if name in depends_on]


def changed(field):
    """Return another value of a field's type than its default."""
    kinds = {
        "str": "x",
        "str | None": "x",
        "int | None": 7,
        "float | None": 0.5,
        "Path | None": Path("/x"),
        "tuple[str, ...]": ("suffix", "x"),
    }
    return not field.default if field.type == "bool" else kinds[field.type]


def test_settings_are_the_same_after_json():
    assert to_plain(Settings()) == {}
    for field in dataclasses.fields(Settings):
        settings = Settings(**{field.name: changed(field)})
        plain = json.loads(json.dumps(to_plain(settings)))
        assert list(plain) == [field.name]
        assert from_plain(plain) == settings


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ({"colour": 1}, "no setting is called 'colour'"),
        ({"num_threads": "2"}, r"cannot be read: Expected `int \| null`, got `str`"),
        ({"prompt_cache": 3}, "cannot be read"),
    ],
)
def test_other_values_are_refused(plain, complaint):
    with pytest.raises(ConfigError, match=complaint):
        from_plain(plain)
