"""An engine whose experts are in slots and packed, in main memory both: the tokens of the plain one, and its errors."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.errors import CapacityError, ConfigError, StorageError
from moeflow.core.hybrid_config import HybridConfig
from moeflow.engine.engine import Engine
from moeflow.experts.cached_experts import CachedExperts
from moeflow.experts.hybrid import hybrid_pool
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.small_families import greedy_passes, prompts_of
from tests.checkpoint.packed.slabs import flip_bit
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

LAYERS, NUM_TOKENS = 2, 8
LENGTHS = (3, 40, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, vocab_size=512)
    return str(folder)


def config_of(model, num_slots, **hybrid):
    """Return a configuration where torch stands in for a GPU."""
    plain = resolve(Settings(model=model, dtype="float32", num_threads=1, kv_cache_bytes=2**20)).config
    shares = {"cpu_weight_format": "float32", "cpu_isa": extension.best_isa(""), "stream_tokens": 0} | hybrid
    return dataclasses.replace(
        plain, cpu_isa="", packed_file="", hybrid=HybridConfig(num_gpu_experts=num_slots, **shares)
    )


def answers(config):
    engine = Engine.load(config)
    found = {str(number): [] for number in range(len(LENGTHS))}
    for outputs in greedy_passes(engine, prompts_of(LENGTHS), NUM_TOKENS):
        for output in outputs:
            found[output.request_id] += output.token_ids
    stats = engine.stats()
    engine.close()
    return found, stats


@pytest.mark.parametrize("stream_tokens", [0, 20])
def test_tokens_are_those_of_the_plain_engine(model, stream_tokens):
    plain = resolve(Settings(model=model, dtype="float32", num_threads=1, kv_cache_bytes=2**20)).config
    expected, stats = answers(plain)
    assert (stats.experts_on_gpu, stats.gpu_pairs_total) == (0, 0)
    for num_slots in (0, 2, 4):
        found, stats = answers(config_of(model, num_slots, stream_tokens=stream_tokens))
        assert found == expected
        assert stats.experts_on_gpu == num_slots * LAYERS
        num_shared = 0 if num_slots == 4 else sum(LENGTHS) + len(LENGTHS) * (NUM_TOKENS - 1)
        is_streamed = stream_tokens > 0 and num_slots < 4
        num_shared -= is_streamed * sum(LENGTHS)
        assert stats.gpu_pairs_total + stats.cpu_pairs_total == 2 * LAYERS * num_shared
        assert stats.streamed_passes_total == is_streamed
        assert (stats.gpu_share > 0) == (num_slots == 2)


def test_packed_experts_are_read_as_they_are(model, tmp_path, monkeypatch):
    expected, _ = answers(config_of(model, 2, stream_tokens=20))
    file = tmp_path / "packed"
    spec = pack(model, file, cache_dir=tmp_path, dtype="float32").spec
    config = config_of(model, 2, stream_tokens=20, packed_experts_file=str(file))
    with monkeypatch.context() as patch:
        patch.setattr(PackedExperts, "parts", None)  # which a loader fills
        assert answers(config)[0] == expected
    flip_bit(file, spec.offset(spec.number(1, 2)) + 5)
    with pytest.raises(StorageError, match="layer 1, expert 2: cannot be read"):
        Engine.load(config)
    pack(model, tmp_path / "int8", cache_dir=tmp_path, quantize="int8")
    other = config_of(model, 2, packed_experts_file=str(tmp_path / "int8"))
    with pytest.raises(ConfigError, match="int8 has experts of another model or format: plan again, or delete"):
        Engine.load(other)


def test_a_format_without_a_way_to_the_gpu_is_refused(model):
    with pytest.raises(ConfigError, match=r"experts in q3_k have no way to the GPU; those in float32, .*--quantize"):
        Engine.load(config_of(model, 2, cpu_weight_format="q3_k"))


def test_a_gpu_without_memory_is_explained(model, monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(hybrid_pool, "SlotMover", refuse)
    with pytest.raises(CapacityError, match=r"no memory for the buffers of experts: raise its limit \(--gpu-memory\)"):
        Engine.load(config_of(model, 2))


def test_a_trace_of_routing_is_needed_where_one_is_named(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        Engine.load(config_of(model, 2, popularity_file=str(tmp_path / "missing")))


def on_disk(config, folder, num_slots):
    """Return a configuration whose main memory has slots for so many experts."""
    slots = ExpertSlotsConfig(packed_weights_file=str(folder / "packed.slabs"), num_slots=num_slots, slab_bytes=0)
    return dataclasses.replace(config, experts=slots)


@pytest.mark.parametrize("num_slots", [2, 5])
def test_experts_from_disk_give_the_same_tokens(model, tmp_path, num_slots):
    plain = resolve(Settings(model=model, dtype="float32", num_threads=1, kv_cache_bytes=2**20)).config
    expected, _ = answers(plain)
    for stream_tokens in (0, 20):
        for num_gpu_experts in (0, 2, 4):
            config = config_of(model, num_gpu_experts, stream_tokens=stream_tokens)
            found, stats = answers(on_disk(config, tmp_path, num_slots))
            assert found == expected
            assert stats.experts_on_gpu == num_gpu_experts * LAYERS
            assert (stats.expert_misses_total > 0) == (num_gpu_experts < 4)
            assert stats.experts_in_slots <= LAYERS * (4 - num_gpu_experts)
            tiers = {tier.name: tier.num_needed for tier in stats.expert_tiers}
            if num_gpu_experts < 4:
                assert list(tiers) == ["the GPU", "main memory", "disk"][num_gpu_experts == 0 :]
            assert (tiers.get("the GPU", 0) > 0) == (num_gpu_experts == 2)
            in_memory = answers(config)[1]
            assert (stats.gpu_hits_total, stats.gpu_pairs_total) == (
                in_memory.gpu_hits_total,
                in_memory.gpu_pairs_total,
            )


def test_an_expert_that_cannot_be_read_fails_its_pass_alone(model, tmp_path, monkeypatch):
    expected, _ = answers(config_of(model, 2))
    engine = Engine.load(on_disk(config_of(model, 2), tmp_path, 2))

    def fail(*_):
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(CachedExperts, "compute_others", fail)
        with pytest.raises(RuntimeError, match="the disk is gone"):
            list(greedy_passes(engine, prompts_of(LENGTHS[:1]), NUM_TOKENS))
    found = [token for outputs in greedy_passes(engine, prompts_of(LENGTHS[:1]), NUM_TOKENS) for token in outputs]
    assert [token for output in found for token in output.token_ids] == expected["0"]
    engine.close()
