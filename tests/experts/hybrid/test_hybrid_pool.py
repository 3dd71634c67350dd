"""Hybrid experts against all experts in one place, while they move, and without an access that nothing orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moeflow.core import hybrid_config
from moeflow.core.hybrid_config import HybridConfig
from moeflow.experts.hybrid import hybrid_experts, hybrid_pool
from moeflow.experts.hybrid.disk_experts import ExpertsOnDisk
from moeflow.experts.hybrid.hybrid_experts import HybridExperts, HybridLayers, SlotMatrices
from moeflow.experts.hybrid.hybrid_pool import HybridPool
from moeflow.experts.hybrid.popularity import Move
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.device_flag import DeviceFlag
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.experts import fused_experts
from tests.experts.hybrid.watched_lanes import Event, WatchedLanes, WatchedSums
from tests.experts.test_cached_experts import make_pool
from tests.pipeline.devices.fake_cuda import Race

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="no kernels here")

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 3, 6, 2, 32, 48
ROWS = 20
STREAMED = 8  # tokens
CPU = torch.device("cpu")


class Rig:
    """A pool over watched lanes, and the weights of all its experts."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        num_slots: int,
        formats: tuple[str, ...] = ("float32",) * LAYERS,
        num_in_memory: int = 0,
    ) -> None:
        """`num_in_memory`: slots of main memory for experts from disk; 0: it has all experts."""
        self.lanes = WatchedLanes()
        self.tolerance = 1e-4 if set(formats) == {"float32"} else 0.05  # the CPU rounds activations as well
        monkeypatch.setattr(WatchedSums, "lanes", self.lanes, raising=False)
        monkeypatch.setattr(hybrid_experts, "PresentExperts", WatchedSums)
        monkeypatch.setattr(hybrid_pool, "lanes_of", lambda _: self.lanes)
        monkeypatch.setattr(DeviceFlag, "wait", lambda flag, seconds: self.lanes.wait(flag, seconds))
        monkeypatch.setattr(hybrid_config, "_SET_BYTES", 2 * 3 * 4 * HIDDEN * WIDTH)  # two experts
        config = HybridConfig(
            num_gpu_experts=num_slots, cpu_weight_format=formats[0], cpu_isa="", stream_tokens=STREAMED
        )
        generator = torch.Generator().manual_seed(num_slots)
        self.weights, packed = [], []
        for weight_format in formats:
            gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator).bfloat16().float() / 4
            down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator).bfloat16().float() / 4
            self.weights.append((gate_up, down))
            packed.append(PackedExperts.pack(gate_up, down, weight_format))
        self.disk = make_pool(packed, num_in_memory)[0] if num_in_memory else None
        self.layers = HybridLayers(config, [(name, name) for name in formats], EXPERTS, CPU, self.disk)
        for experts in packed:
            slots = SlotMatrices(
                torch.full((num_slots, 2 * WIDTH, HIDDEN), torch.nan), torch.full((num_slots, HIDDEN, WIDTH), torch.nan)
            )
            if self.disk is None:
                HybridExperts(self.layers, slots, experts, None)
            else:
                ExpertsOnDisk(self.layers, slots, self.disk.slots, None)
        read, step_of = ExpertsOnDisk.slabs, self.lanes.host

        def read_on_host(*given: Any, is_scan: bool) -> Any:
            with step_of():
                return read(*given, is_scan=is_scan)

        monkeypatch.setattr(ExpertsOnDisk, "slabs", read_on_host)
        self.pool = HybridPool(self.layers, ROWS, TOP_K)
        self.lanes.watch(self.pool)
        self.moves: list[Move] = []
        self.num_needed = 0  # distinct experts of all layers and passes
        self.pool.popularity.moves = self._next_moves  # type: ignore[method-assign]
        run = self.pool._seam._run_step

        def run_on_host(step: Any) -> None:
            with step_of():
                run(step)

        self.pool._seam._run_step = run_on_host

    def run(self, num_tokens: int, seed: int = 0) -> None:
        """Compute a pass, and compare each layer."""
        generator = torch.Generator().manual_seed(seed)
        ids = [
            torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
            for _ in range(LAYERS)
        ]
        if self.disk is not None:
            self.disk.cache.begin_pass()
            self.disk.cache.leave(self.pool.is_on_gpu.ravel())
        with self.lanes.computing():
            self.pool.begin_pass(num_tokens)
            for layer in range(LAYERS):
                hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
                weights = torch.rand(num_tokens, TOP_K, generator=generator)
                got = self.layers.experts[layer].compute(hidden, ids[layer], weights, hidden.clone())
                expected = fused_experts(hidden, *self.weights[layer], ids[layer], weights, residual=hidden.clone())
                torch.testing.assert_close(got, expected, atol=self.tolerance, rtol=self.tolerance)
        self.pool.end_pass()
        streams = num_tokens >= STREAMED
        self.num_needed += LAYERS * EXPERTS if streams else sum(len(of_layer.unique()) for of_layer in ids)

    def run_twice(self, num_tokens: int) -> None:
        """Compute two passes."""
        for seed in range(2):
            self.run(num_tokens, seed)

    def _next_moves(self, is_on_gpu: np.ndarray, at_most: int) -> list[Move]:
        found, self.moves = self.moves[:at_most], self.moves[at_most:]
        return found


@pytest.mark.parametrize("num_slots", [0, 1, 3, EXPERTS])
@pytest.mark.parametrize("num_tokens", [1, 5, STREAMED, ROWS])
def test_each_expert_is_computed_once(monkeypatch, num_slots, num_tokens):
    rig = Rig(monkeypatch, num_slots)
    for seed in range(3):
        rig.run(num_tokens, seed)
    counters = rig.pool.counters()
    is_streamed = num_tokens >= STREAMED and num_slots < EXPERTS
    assert counters.num_streamed_passes == 3 * is_streamed
    is_counted = num_slots < EXPERTS and not is_streamed
    assert counters.num_gpu_pairs + counters.num_cpu_pairs == is_counted * 3 * num_tokens * TOP_K * LAYERS
    num_hits = counters.num_gpu_hits + counters.num_cpu_hits
    assert num_hits == (rig.num_needed if num_slots < EXPERTS else 0)
    if is_streamed:
        assert counters.num_gpu_hits == 3 * LAYERS * num_slots
    if not num_slots:
        assert counters.num_gpu_hits == 0
    assert rig.lanes.cuda.races == []


def test_experts_move_while_passes_run(monkeypatch):
    rig = Rig(monkeypatch, 2)
    slots = rig.pool._tables.slots
    assert (slots[:, :2] == [0, 1]).all()
    rig.run(3)
    rig.moves, rig.lanes.is_slow = [Move(0, 0, 5), Move(2, 1, 4), Move(1, 0, 3)], True
    rig.run(3, 1)  # two begin, and are under way
    assert [slots[0, 0], slots[0, 5], slots[2, 1], slots[2, 4]] == [-1, -1, -1, -1]
    rig.run(STREAMED, 2)
    rig.run(3, 3)
    assert rig.pool.counters().num_moves == 0
    rig.lanes.is_slow = False
    rig.run(1, 4)
    assert [slots[0, 5], slots[2, 4], slots[1, 0]] == [0, 1, -1]
    rig.run(2, 5)
    assert slots[1, 3] == 0
    assert rig.pool.counters().num_moves == 3
    assert rig.lanes.cuda.races == []


@pytest.mark.parametrize("num_in_memory", [2, 7])
def test_experts_move_from_disk(monkeypatch, num_in_memory):
    rig = Rig(monkeypatch, 2, num_in_memory=num_in_memory)
    rig.moves, rig.lanes.is_slow = [Move(0, 0, 5), Move(2, 1, 4)], True
    for seed, num_tokens in enumerate((3, 3, ROWS, STREAMED, 1)):
        rig.run(num_tokens, seed)
        rig.disk.cache.check_integrity()
    rig.lanes.is_slow = False
    rig.moves = [Move(1, 0, 5), Move(0, 1, 0)]
    for seed, num_tokens in enumerate((1, 5, STREAMED, 2)):
        rig.run(num_tokens, seed)
    assert rig.pool.counters().num_moves == 4
    assert not (rig.disk.cache.is_there(0, LAYERS) & rig.pool.is_on_gpu).any()
    assert rig.lanes.cuda.races == []


@pytest.mark.parametrize("formats", [("float32",) * LAYERS, ("bfloat16", "float32", "bfloat16")], ids=str)
def test_slots_have_the_checkpoints_weights(monkeypatch, formats):
    rig = Rig(monkeypatch, 2, formats)
    rig.run(ROWS)  # streamed
    rig.moves = [Move(1, 0, 5)]
    rig.run(1)
    rig.run(1)
    for layer in range(LAYERS):
        matrices, (gate_up, down) = rig.layers.experts[layer].matrices, rig.weights[layer]
        experts = [5, 1] if layer == 1 else [0, 1]
        assert torch.equal(matrices.gate_up, gate_up[experts])
        assert torch.equal(matrices.down, down[experts])


@pytest.mark.parametrize("forgotten", ["copies_wait_for", "passes_wait_for"])
@pytest.mark.parametrize("num_tokens", [1, STREAMED])
def test_a_forgotten_wait_is_a_race(monkeypatch, forgotten, num_tokens):
    if (forgotten, num_tokens) == ("passes_wait_for", 1):
        pytest.skip("short passes wait for the host alone")
    rig = Rig(monkeypatch, 3)
    rig.run(5)
    rig.moves = [Move(2, 2, 4)]  # which the pass has used behind its last wait
    monkeypatch.setattr(rig.lanes, forgotten, lambda _: None)
    with pytest.raises(Race):
        rig.run_twice(num_tokens)


@pytest.mark.parametrize("num_tokens", [1, STREAMED])
def test_memory_between_disk_and_gpu_waits_for_its_last_copy(monkeypatch, num_tokens):
    rig = Rig(monkeypatch, 1, num_in_memory=4)
    rig.run(num_tokens)
    rig.moves, rig.lanes.is_slow = [Move(0, 0, 4), Move(1, 0, 4)], True
    monkeypatch.setattr(Event, "synchronize", lambda _: None)
    with pytest.raises(Race):
        rig.run_twice(num_tokens)


def test_a_pass_that_failed_is_forgotten(monkeypatch):
    rig = Rig(monkeypatch, 2)

    def fail(*_: object) -> None:
        raise RuntimeError("the host failed")

    with monkeypatch.context() as patch:
        patch.setattr(WatchedSums, "sums", fail)
        with pytest.raises(RuntimeError, match="the host failed"):
            rig.run(2)
    rig.pool.drop_pass()
    rig.run(2, 1)
    assert rig.lanes.cuda.races == []
