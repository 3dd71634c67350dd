"""GGUF models of K-quants through the engine: in memory, mapped from packed weights, and with experts on disk."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.engine import expert_store
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
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
    parts = write_block_model(tmp_path / "parts.gguf", family, kind_of, split_max_tensors=9)
    first, *others = sorted(tmp_path.glob("parts-*.gguf"))
    in_parts = config_of(others[-1], cache_dir=tmp_path)
    assert (len(others) > 2, parts.exists(), in_parts.model_path) == (True, False, str(first))
    assert run(in_parts, PROMPTS) == expected
    if family == "llama":
        return
    packed = str(pack(str(first), None, cache_dir=tmp_path).path)
    assert packed != mapped.packed_file
    for path, file in ((first, packed), (model, mapped.packed_file)):
        assert config_of(path, cache_dir=tmp_path).packed_file == file
    for config, file, num_slots in (
        (resident, str(index.path), 4),
        (resident, str(index.path), 7),
        (in_parts, packed, 4),
    ):
        experts = ExpertSlotsConfig(packed_weights_file=file, num_slots=num_slots, slab_bytes=index.spec.slab_bytes)
        assert run(dataclasses.replace(config, experts=experts), PROMPTS) == expected
