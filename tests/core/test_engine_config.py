"""The files of a configuration: each is needed at the start, or made by the engine."""

from __future__ import annotations

import dataclasses
import re
import types
from typing import get_args, get_type_hints

import msgspec
import pytest

from moeflow.core.engine_config import (
    DraftModelConfig,
    EngineConfig,
    ExpertSlotsConfig,
    LenderConfig,
    RemoteExpertsConfig,
    SchedulerConfig,
)
from moeflow.core.hybrid_config import HybridConfig

NEEDED = {
    "model_path",
    "packed_file",
    "importance_file",
    "hybrid.popularity_file",
    "hybrid.packed_experts_file",
    "draft_models.model_path",
    "experts.remote.token_file",
}
MADE = {
    "experts.packed_weights_file",
    "prompt_cache.folder",
    "graph_file",
    "trace_file",
}


def file_fields(kind, prefix=""):
    """Return the dotted names of the fields of files and folders, in the configuration and in all its parts."""
    found = set()
    for name, hint in get_type_hints(kind).items():
        if re.search(r"(_path|_file|folder)$", name):
            found.add(prefix + name)
        parts = get_args(hint) if isinstance(hint, types.UnionType) or get_args(hint) else (hint,)
        for part in parts:
            if dataclasses.is_dataclass(part) or (isinstance(part, type) and issubclass(part, msgspec.Struct)):
                found |= file_fields(part, f"{prefix}{name}.")
    return found


def test_each_file_is_needed_or_made():
    assert file_fields(EngineConfig) == NEEDED | MADE


@pytest.fixture
def config():
    remote = RemoteExpertsConfig(lenders=(LenderConfig(host="a", port=1),), token_file="/token")
    draft = DraftModelConfig(
        name="d", model_path="/draft", num_layers=1, kv_dtype="float32", num_blocks=1, chunk_tokens=1, num_bytes=1
    )
    own_layers = dataclasses.replace(draft, name="early-exit", model_path="")
    return EngineConfig(
        model_path="/model",
        model_name="m",
        dtype="float32",
        weight_format="int8",
        embedding_format="int8",
        importance_file="/importance",
        cpu_isa="",
        kv_dtype="float32",
        device="cpu",
        num_threads=1,
        scheduler=SchedulerConfig(num_blocks=1, max_model_len=16),
        kv_cache_bytes=1,
        experts=ExpertSlotsConfig(packed_weights_file="/made", num_slots=2, slab_bytes=1, remote=remote),
        hybrid=HybridConfig(
            num_gpu_experts=1,
            cpu_weight_format="int8",
            cpu_isa="",
            stream_tokens=0,
            popularity_file="/popularity",
            packed_experts_file="/experts",
        ),
        draft_models=(draft, own_layers),
        packed_file="/packed",
        trace_file="/written",
    )


def test_the_needed_files_are_those_that_the_engine_only_reads(config):
    assert sorted(config.needed_files) == [
        "/draft",
        "/experts",
        "/importance",
        "/model",
        "/packed",
        "/popularity",
        "/token",
    ]
