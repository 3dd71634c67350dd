"""`LLMSettings` against the fields of `Settings`, and against what reads the values."""

import os
from pathlib import Path
from types import UnionType
from typing import get_args, get_type_hints

import pytest
import torch

from moeflow.llm_settings import LLMSettings
from moeflow.planner.setting_values import read_settings
from moeflow.planner.settings import Settings, user_settings

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
    assert list(TAKEN) == [name for name in user_settings() if name != "model"]
    assert LLMSettings.__required_keys__ == frozenset()


@pytest.mark.parametrize("name", TAKEN)
def test_a_key_takes_its_fields_type_however_it_may_be_written(name):
    written = set().union(*(WRITTEN[part] for part in parts(READ[name])))
    assert parts(TAKEN[name]) == written | ({OF_TORCH[name]} if name in OF_TORCH else set())


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_key_takes_is_read_as_the_fields_type(name):
    kinds = tuple(getattr(part, "__origin__", part) for part in parts(READ[name]))
    for part in parts(TAKEN[name]):
        for example in EXAMPLES[part]:
            assert isinstance(read_settings(Settings, {name: example})[name], kinds)
