"""Eviction while a pass goes over all experts: against brute force, and over whole passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moeflow.experts.cache.eviction_selector import Scan, scan_victim
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES

NUM_LAYERS, NUM_EXPERTS = 3, 4


@given(
    layer=st.integers(0, NUM_LAYERS - 1),
    num_kept=st.integers(0, NUM_LAYERS * NUM_EXPERTS),
    evictable=arrays.arrays(bool, NUM_LAYERS * NUM_EXPERTS),
    scores=arrays.arrays(float, NUM_LAYERS * NUM_EXPERTS, elements=st.sampled_from([0.0, 1.0, 2.0])),
    leased=arrays.arrays(int, NUM_LAYERS, elements=st.integers(0, 2)),
    for_demand=st.booleans(),
)
def test_the_past_goes_first_where_a_layer_has_more_than_its_share(
    layer, num_kept, evictable, scores, leased, for_demand
):
    scan = Scan(layer, kept_of_layer=num_kept // NUM_LAYERS)
    held = evictable.reshape(NUM_LAYERS, -1).sum(axis=1) + leased

    def worth(number):  # of being kept: the tuple is compared from the left
        its_layer = number // NUM_EXPERTS
        is_ahead = its_layer > layer
        is_crowded = held[its_layer] > num_kept // NUM_LAYERS
        return is_ahead, -its_layer if is_ahead else not is_crowded, scores[number], number

    candidates = [n for n in np.flatnonzero(evictable) if for_demand or n // NUM_EXPERTS <= layer]
    expected = min(candidates, key=worth, default=None)
    assert scan_victim(scan, evictable, held, scores, for_demand=for_demand) == expected


class InstantDisk:
    """Reads before anybody can wait, and counts."""

    def __init__(self):
        self.read = []

    def start_loads(self, jobs, on_done):
        for job in jobs:
            self.read.append(job.expert)
            on_done(job, None)
        return [None] * len(jobs)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_slots", [16, 40, 72])
def test_passes_over_all_find_what_fits_beside_the_window(policy, num_slots):
    num_layers, num_experts, window = 10, 8, 4
    disk = InstantDisk()
    cache = ExpertCache(
        num_layers=num_layers,
        num_experts=num_experts,
        num_slots=num_slots,
        slab_bytes=1,
        policy=POLICIES[policy](num_layers, num_experts),
        start_loads=disk.start_loads,
    )
    everything = range(num_experts)
    num_read = []
    for _ in range(4):
        cache.begin_pass()
        for layer in range(num_layers):
            found = cache.layer_scan.at(layer, everything, window=window)
            for expert in [*found.kept, *found.read_ahead, *found.absent]:
                cache.acquire(layer, [expert]).release()
            cache.layer_scan.read_ahead(window)
            cache.check_integrity()
        num_read.append(len(disk.read))
        disk.read.clear()
    kept = (num_slots - window) // num_layers * num_layers
    assert num_read[0] == num_layers * num_experts
    assert num_read[-1] <= num_layers * num_experts - kept
