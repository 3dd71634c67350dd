"""`LLMSettings` against the fields of `Settings`, and against what reads the values."""

import os
from pathlib import Path
from types import UnionType
from typing import get_args, get_type_hints

import click
import pytest
import torch

from moeflow.cli.generate import generate
from moeflow.core.errors import ConfigError
from moeflow.llm_settings import LLMSettings
from moeflow.settings.names import flag_names, named_as_fields
from moeflow.settings.settings import Settings, user_settings
from moeflow.settings.values import read_settings

READ = get_type_hints(Settings)
TAKEN = get_type_hints(LLMSettings)
WRITTEN = {  # how a value may be written that is read as the type to the left
    bool: {bool},
    int: {int, str},
    float: {float, str},
    str: {str},
    Path: {str, os.PathLike[str]},
    type(None): {type(None)},
    tuple[str, ...]: {str, list[str], tuple[str, ...]},
}
OF_TORCH = {"dtype": torch.dtype, "kv_dtype": torch.dtype, "device": torch.device}
EXAMPLES = {
    bool: [True],
    int: [2],
    float: [0.5],
    str: ["2"],
    os.PathLike[str]: [Path("folder")],
    type(None): [None],
    list[str]: [[], ["suffix"]],
    tuple[str, ...]: [(), ("suffix", "auto")],
    torch.dtype: [torch.bfloat16],
    torch.device: [torch.device("cpu")],
}


def parts(hint):
    """Return the types of a union, or the one type."""
    return set(get_args(hint)) if isinstance(hint, UnionType) else {hint}


def test_there_is_a_key_for_every_setting_of_users_but_the_model():
    fields = [name for name in user_settings() if name != "model"]
    assert list(TAKEN) == [*flag_names(), *fields]
    assert LLMSettings.__required_keys__ == frozenset()


@pytest.mark.parametrize(("flag", "field"), flag_names().items())
def test_a_key_named_as_an_option_takes_what_its_field_takes(flag, field):
    assert TAKEN[flag] == TAKEN[field]
    assert named_as_fields({flag: 1, "device": "cpu"}) == {field: 1, "device": "cpu"}


def test_options_are_named_as_click_names_them():
    params = {param.name: param.opts[0] for param in generate.params if isinstance(param, click.Option)}
    flags = {field: params[field] for field in flag_names().values() if field in params}
    assert {flag: field for field, flag in flags.items()} == {
        f"--{flag.replace('_', '-')}": field for flag, field in flag_names().items() if field in params
    }


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"gpu_memory_utilization": 0.9}, "did you mean 'gpu_memory_bytes'"),
        ({"tensor_parallel_size": 2}, "did you mean 'num_ranks'"),
        ({"max_modellen": 2}, "did you mean 'max_model_len'"),
        ({"memry": "1GiB"}, "did you mean 'memory'"),
        ({"enforce_eager": True}, "`LLMSettings` of moeflow.llm_settings has all of them"),
        ({"memory": "1GiB", "memory_bytes": 2**30}, "'memory_bytes' is given under two names"),
    ],
)
def test_a_wrong_name_gets_a_short_hint(settings, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        named_as_fields(settings)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("name", [name for name in TAKEN if name in READ])
def test_a_key_takes_its_fields_type_however_it_may_be_written(name):
    written = set().union(*(WRITTEN[part] for part in parts(READ[name])))
    assert parts(TAKEN[name]) == written | ({OF_TORCH[name]} if name in OF_TORCH else set())


@pytest.mark.parametrize("name", [name for name in TAKEN if name in READ])
def test_what_a_key_takes_is_read_as_the_fields_type(name):
    kinds = tuple(getattr(part, "__origin__", part) for part in parts(READ[name]))
    for part in parts(TAKEN[name]):
        for example in EXAMPLES[part]:
            assert isinstance(read_settings(Settings, {name: example})[name], kinds)
