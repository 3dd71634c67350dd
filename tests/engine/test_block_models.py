"""GGUF models of K-quants through the engine: in memory, mapped from packed weights, and with experts on disk."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.engine import expert_store
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.planner.settings import Settings
from tests.checkpoint.block_models import as_q4_k_m, write_block_model
from tests.engine.streamed_runs import run

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
PROMPTS = [[5, 9, 70, 31, 7], [40], list(range(20, 60))]


def config_of(model, **settings):
    return resolve(Settings(model=str(model), num_threads=1, kv_cache_bytes=2**20, **settings)).config


def uniform(name):
    return "F32" if "ffn_gate_inp" in name else "IQ4_XS"


@pytest.mark.parametrize("kind_of", [as_q4_k_m, uniform])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_tokens_are_the_same_wherever_weights_lie(tmp_path, monkeypatch, family, kind_of):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    model = write_block_model(tmp_path / "model.gguf", family, kind_of)
    resident = config_of(model, cache_dir=tmp_path)
    assert bool(resident.layer_formats) == (kind_of is as_q4_k_m)
    expected = run(resident, PROMPTS)
    index = pack(str(model), None, cache_dir=tmp_path)
    mapped = config_of(model, cache_dir=tmp_path)
    assert mapped.packed_file == str(index.path)
    assert run(mapped, PROMPTS) == expected
    if family == "llama":
        return
    for num_slots in (4, 7):
        experts = ExpertSlotsConfig(
            packed_weights_file=str(index.path), num_slots=num_slots, slab_bytes=index.spec.slab_bytes
        )
        assert run(dataclasses.replace(resident, experts=experts), PROMPTS) == expected
