"""Replicas share a machine: the share of each, the parts held once, and the number that fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.plan import Forecast
from moeflow.core.units import GIB, MIB
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.choices.replica_choice import share_of
from moeflow.planner.costs.process_memory import PROCESS_BYTES, served_bytes
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.resolve import Resolved, resolve
from moeflow.settings.settings import Settings
from tests.planner.examples import machine as round_machine
from tests.shapes import MIXTRAL
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

VOCAB_SIZE = 258  # of the tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


def resolved(model: str, num_replicas: int, free_bytes: int = 16 * GIB, **settings) -> Resolved:
    machine = HostResources(8, 32 * GIB, free_bytes, None, 0)
    asked = {"cache_dir": Path(model), "is_served": True, "num_replicas": num_replicas, **settings}
    return resolve(Settings(model=model, **asked), resources=machine)


def test_threads_keys_and_values_are_divided_and_limits_of_a_pass_are_not(model):
    settings = {"kv_cache_bytes": 12 * MIB, "max_num_seqs": 6, "num_threads": 7}
    alone, both = (resolved(model, number, **settings) for number in (1, 2))
    assert (alone.plan.num_replicas, both.plan.num_replicas) == (1, 2)
    assert (alone.config.num_threads, both.config.num_threads) == (7, 3)
    assert both.config.kv_cache_bytes == alone.config.kv_cache_bytes // 2
    assert both.config.scheduler.max_num_seqs == alone.config.scheduler.max_num_seqs == 6
    assert "replicas" not in dict(alone.plan.reasons)
    assert dict(both.plan.reasons)["replicas"].startswith("2: each has 3 threads and may use 8.0 GiB of memory")
    assert resolved(model, 20).config.num_threads == 1


def test_each_may_itself_be_ranks(model):
    config = resolved(model, 2, num_ranks=2).config
    assert (config.num_threads, config.parallel.num_ranks) == (2, 2)


def test_one_replica_is_what_there_was_without_them(model):
    one, none = (resolved(model, number, memory_bytes=GIB).plan for number in (1, None))
    assert one == dataclasses.replace(none, settings=none.settings | {"num_replicas": 1})


def test_of_a_limit_what_the_server_itself_holds_counts_once(model):
    limit = 2 * GIB
    alone, three = (resolved(model, number, memory_bytes=limit).config.memory for number in (1, 3))
    assert alone.limit_bytes == limit
    once = (3 * three.limit_bytes - limit) / 2  # each has this, and a third of the rest
    assert once == pytest.approx(served_bytes(0, dataclasses.replace(MIXTRAL, vocab_size=VOCAB_SIZE)), abs=4)


def test_no_engine_s_share_is_more_than_there_is():
    assert share_of(100, 2, shared_bytes=40) == 40 + 30
    assert share_of(100, 2, shared_bytes=140) == 100


def test_mapped_weights_are_in_memory_once(model, tmp_path):
    file_bytes = pack(model, tmp_path / "packed", cache_dir=tmp_path).spec.file_bytes
    asked = {"free_bytes": 2 * PROCESS_BYTES + file_bytes * 3 // 2, "dtype": "float32", "max_model_len": 16}
    with pytest.raises(CapacityError, match="1 would"):
        resolved(model, 2, **asked)
    plan = resolved(model, 2, packed_weights_file=tmp_path / "packed", **asked).plan
    assert "in memory once" in dict(plan.reasons)["replicas"]
    assert plan.config.packed_file
    assert "in memory for each" in dict(resolved(model, 2).plan.reasons)["replicas"]


def test_experts_that_come_from_disk_are_in_memory_for_each(tmp_path):
    write_tiny_mixtral(tmp_path, intermediate_size=4096, num_local_experts=16)  # 32 experts of 1.5 MiB
    model, limit = str(tmp_path), 2 * GIB
    roomy = resolved(model, 2, memory_bytes=limit, max_num_seqs=4, max_num_batched_tokens=64).config.memory
    server = 2 * roomy.limit_bytes - limit
    least = roomy.process_bytes + roomy.work_bytes
    tight = {"memory_bytes": server + 2 * (least - server + 16 * MIB), "max_num_seqs": 4, "max_num_batched_tokens": 64}
    before = resolved(model, 2, **tight)
    assert before.config.experts is not None
    assert before.config.memory.limit_bytes == least + 16 * MIB
    pack(model, None, cache_dir=tmp_path)
    assert resolved(model, 2, **tight).config == before.config


def test_engines_that_share_a_machine_bring_no_more_than_one_where_it_is_busy(model):
    """Each has half of its memory's and processor's speed; only what each does on its own comes twice."""
    asked = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_bytes": 16 * MIB}

    def forecast_of(num_replicas: int, pass_s: float) -> Forecast:
        ram = round_machine(ram=16 * GIB).level("ram")
        ram = dataclasses.replace(ram, processor=dataclasses.replace(ram.processor, pass_s=pass_s, token_s=0.0))
        machine = dataclasses.replace(round_machine(ram=16 * GIB), levels=(ram,), links=())
        settings = Settings(model=model, is_served=True, num_replicas=num_replicas, cache_dir=Path(model), **asked)
        resources = HostResources(8, 32 * GIB, 16 * GIB, None, 0)
        forecast = resolve(settings, machine_of=lambda _: machine, resources=resources).plan.forecast
        assert forecast is not None
        return forecast

    alone, both = (forecast_of(number, 0.0) for number in (1, 2))
    assert both.prefill_tokens_per_s.value == pytest.approx(alone.prefill_tokens_per_s.value)
    assert both.time_to_first_token_s.value == pytest.approx(2 * alone.time_to_first_token_s.value)
    alone, both = (forecast_of(number, 10.0) for number in (1, 2))
    assert both.decode_tokens_per_s.value == pytest.approx(2 * alone.decode_tokens_per_s.value, rel=1e-3)
    assert both.memory[0].peak_bytes.value == pytest.approx(2 * alone.memory[0].peak_bytes.value, rel=0.05)


def test_too_little_memory_says_how_many_would_fit(model):
    free = 3 * PROCESS_BYTES + 32 * MIB
    assert resolved(model, 3, free).plan.num_replicas == 3
    with pytest.raises(
        CapacityError, match=r"5 replicas \(--replicas\) do not fit, 3 would\. For each of them: .* need"
    ):
        resolved(model, 5, free)
    with pytest.raises(CapacityError, match="do not fit, nor would one"):
        resolved(model, 2, PROCESS_BYTES // 2)


def test_where_there_can_be_only_one(model):
    with pytest.raises(ConfigError, match=r"serve.*batch"):
        resolved(model, 2, is_served=False)
    for name in ("record_routing", "trace_file", "graph_file"):
        with pytest.raises(ConfigError, match="one engine"):
            resolved(model, 2, **{name: Path("file")})
    with pytest.raises(ConfigError, match="does not go with a device"):
        resolved(model, 2, device="emulated:1GiB,10")
    with pytest.raises(ConfigError, match="num_replicas must be at least 1"):
        resolved(model, 0)


def test_replicas_of_a_shape_without_weights_are_counted_too():
    settings = Settings(model="mixtral-8x7b", is_served=True, num_replicas=3)
    two_fit = HostResources(8, 400 * GIB, 200 * GIB, None, 0)
    with pytest.raises(CapacityError, match=r"^3 replicas \(--replicas\) do not fit, 2 would"):
        resolve(settings, resources=two_fit, needs_weights=False)
