from __future__ import annotations

import numpy as np
import pytest

from moeflow.cli.plan_inputs import hits_of
from moeflow.workload.routing_trace import RoutingRecorder, TraceHeader

HEADER = TraceHeader(identity="x", num_layers=3, num_experts=8, top_k=2, slab_bytes=4096)


def record(file, choose, num_passes=60):
    recorder = RoutingRecorder(file, HEADER)
    for _ in range(num_passes):
        for layer in range(HEADER.num_layers):
            recorder.add_layer(np.array([choose(layer)], dtype=np.int64))
        recorder.end_pass(num_generated=1, compute_s=0.1)
    recorder.close()
    return hits_of(file)


@pytest.mark.slow
def test_even_routing_misses_about_what_is_on_disk(tmp_path):
    chance = np.random.default_rng(0)
    curve = record(tmp_path / "even.moe", lambda _: chance.choice(8, 2, replace=False), 300)
    for on_disk in (0.25, 0.5, 0.75):
        assert curve.misses(on_disk) == pytest.approx(on_disk, abs=0.12)


def test_experts_that_all_tokens_choose_are_read_once(tmp_path):
    curve = record(tmp_path / "same.moe", lambda layer: np.array([layer, layer + 1]))
    assert curve.misses(0.75) < 0.05
