"""Settings as people write them: natural types, and what the command line takes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from moeflow.core.errors import ConfigError
from moeflow.core.units import GIB, MIB
from moeflow.settings.settings import Settings
from moeflow.settings.values import read_settings

SIZES = ("kv_cache_bytes", "memory_bytes", "gpu_memory_bytes", "prompt_cache_bytes")
COUNTS = (
    "num_ranks",
    "num_redundant_experts",
    "num_replicas",
    "max_replicas",
    "micro_batch",
    "prompt_micro_batch",
    "num_threads",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)
FLAGS = ("exact_activations", "prefix_caching", "is_served", "shares_memory")
PATHS = (
    "packed_weights_file",
    "record_routing",
    "graph_file",
    "trace_file",
    "cache_dir",
    "cluster_token_file",
    "prompt_cache",
)
TEXTS = (
    "model",
    "model_name",
    "dtype",
    "quantize",
    "kv_dtype",
    "expert_layout",
    "attention_layout",
    "rank_schedule",
    "device",
    "expert_placement",
    "listen_ranks",
    "ray_address",
    "ray_placement",
    "stages",
    "remote_experts",
    "pipeline",
    "lossy_routing",
    "generation_config",
    "expert_policy",
    "predictor",
    "cpu_isa",
)


def read(name, value):
    return read_settings(Settings, {name: value})[name]


def test_every_setting_is_of_a_known_kind():
    others = (
        *("hosted_experts", "resident_experts", "resident_kv"),
        *("speculators", "target_first_token_s", "capacity_factor"),
    )
    assert {*SIZES, *COUNTS, *FLAGS, *PATHS, *TEXTS, *others} == {field.name for field in fields(Settings)}


def test_several_texts():
    assert read("speculators", ["suffix", Path("a/b")]) == ("suffix", "a/b")
    assert read("speculators", "suffix") == ("suffix",)
    with pytest.raises(ConfigError, match="speculators"):
        read("speculators", 5)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("value", "want"), [("64MiB", 64 * MIB), ("2g", 2 * GIB), (5, 5), (4e9, 4 * 10**9), (np.int64(7), 7), (None, None)]
)
def test_sizes(name, value, want):
    assert read(name, value) == want


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("value", "want"), [("2", 2), (" 3 ", 3), (4, 4), (np.int32(5), 5), (None, None)])
def test_counts(name, value, want):
    assert read(name, value) == want
    assert value is None or type(read(name, value)) is int


@pytest.mark.parametrize("name", PATHS)
def test_paths(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read(name, "some/where") == read(name, Path("some/where")) == Path("some/where")
    assert read(name, "~/here") == Path("/home/somebody/here")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(("value", "want"), [(True, True), (False, False), ("no", False), ("True", True)])
def test_flags(name, value, want):
    assert read(name, value) is want


def test_texts_may_be_torchs_own():
    assert read("dtype", torch.bfloat16) == "bfloat16"
    assert read("device", torch.device("cuda", 1)) == "cuda:1"
    assert read("model", Path("a/model")) == "a/model"


@pytest.mark.parametrize("value", [0.5, "0.5", np.float32(0.5)])
def test_numbers(value):
    assert read("hosted_experts", value) == read("resident_experts", value) == read("resident_kv", value) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SIZES for value in ("much", "-1GiB", 0, -5, 1.5, True, [], b"1", float("inf"))),
        *((name, value) for name in COUNTS for value in ("two", "", "0", 0, -1, 1.5, True, [2], "1e3", "9" * 5000)),
        *((name, value) for name in PATHS for value in (3, "", b"x", "a\0b", ["x"])),
        *((name, value) for name in FLAGS for value in (None, 1, "maybe", [])),
        *((name, value) for name in TEXTS for value in (3, b"x", ["auto"], {})),
        *(("resident_experts", value) for value in ("half", [], True, 10**400)),
        ("dtype", None),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_the_setting(name, value):
    with pytest.raises(ConfigError, match=f"^{name}") as error:
        read(name, value)
    assert len(str(error.value)) < 300
