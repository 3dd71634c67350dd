"""Passes over nearly all experts, and passes of kernels over several layers, step by step on three layers of four."""

from __future__ import annotations

import numpy as np
import pytest

from moeflow.experts.cache.expert_states import ABSENT, LOADING
from tests.experts.cache.fake_disk import SLAB_BYTES, make_cache, use


def started(disk):
    """The experts whose loads have been started and not ended, by layer and number."""
    return [divmod(load.job.expert, 4) for load in disk.waiting()]


def test_a_scan_tells_what_is_kept_what_was_read_for_it_and_what_comes_first():
    cache, disk = make_cache(7)
    use(cache, disk, 1, [2, 0])
    cache.begin_pass()
    assert cache.prefetch(1, [3]) == 1
    disk.finish_all()
    assert cache.prefetch(1, [1]) == 1  # on its way
    found = cache.layer_scan.at(1, [0, 1, 2, 3], window=1)
    assert (found.kept, found.read_ahead, found.absent) == ([0, 2], [3], [1])
    again = cache.layer_scan.at(1, [0, 3], window=1)
    assert (again.kept, again.read_ahead) == ([0, 3], [])  # the prefetch has proved right
    nothing = cache.layer_scan.at(2, [1], window=1)
    assert (nothing.kept, nothing.read_ahead, nothing.absent) == ([], [], [1])


def test_absent_experts_come_in_the_order_of_the_policy_those_on_their_way_first():
    cache, disk = make_cache(4)
    for expert in (3, 1, 2, 0):
        use(cache, disk, 2, [expert])
    use(cache, disk, 0, [0, 1, 2, 3])  # the others are gone, but the policy remembers them
    cache.begin_pass()
    assert cache.prefetch(2, [3]) == 1
    found = cache.layer_scan.at(2, [0, 1, 2, 3], window=2)
    assert found.absent == [3, 0, 2, 1]


def test_what_a_scan_comes_to_next_is_read_ahead_as_far_as_is_allowed():
    cache, disk = make_cache(8)
    use(cache, disk, 1, [2])
    use(cache, disk, 2, [1])
    cache.begin_pass()
    cache.layer_scan.at(0, [0, 1, 2, 3], window=2)
    cache.layer_scan.read_ahead(2)
    assert started(disk) == [(1, 0), (1, 1)]  # 2 of layer 1 is there
    cache.layer_scan.read_ahead(2)
    assert started(disk) == [(1, 0), (1, 1)]
    disk.finish_all()
    cache.layer_scan.read_ahead(5)
    assert started(disk) == [(1, 3), (2, 0), (2, 2)]
    disk.finish_all()
    cache.layer_scan.at(1, [0, 1, 2, 3], window=2)  # those for layer 1 are not waited for any more
    cache.layer_scan.read_ahead(3)
    assert started(disk) == [(2, 3)]
    cache.check_integrity()


def test_a_scan_keeps_an_equal_share_of_each_layer_and_gives_up_what_it_has_passed():
    cache, disk = make_cache(6)  # 3 of them are kept: one of each layer
    use(cache, disk, 0, [0, 1, 2])
    use(cache, disk, 2, [0, 1, 2])
    cache.begin_pass()
    cache.layer_scan.at(0, [0, 1, 2, 3], window=3)
    cache.layer_scan.read_ahead(9)
    # Layer 0 gives two of its three, the least recent first, and its last as well: the pass has been there.
    assert started(disk) == [(1, 0), (1, 1), (1, 2)]
    assert [cache.slot_of(0, expert) for expert in range(3)] == [None] * 3
    assert all(cache.slot_of(2, expert) is not None for expert in range(3))
    disk.finish_all()
    cache.layer_scan.at(1, [0, 1, 2, 3], window=3)
    cache.layer_scan.at(2, [0, 1, 2, 3], window=3)
    use(cache, disk, 2, [3])
    assert cache.slot_of(1, 0) is None  # of a crowded layer that the scan has passed
    assert [cache.slot_of(1, expert) is None for expert in (1, 2)] == [False, False]


def test_for_demand_the_layer_furthest_ahead_gives_its_worst():
    cache, disk = make_cache(4)
    use(cache, disk, 1, [0, 1])
    use(cache, disk, 2, [3, 2])
    cache.begin_pass()
    cache.layer_scan.at(0, [0, 1, 2, 3], window=4)
    assert cache.prefetch(0, [1]) == 0  # nothing that is passed could go
    use(cache, disk, 0, [0])
    assert cache.slot_of(2, 3) is None
    assert [cache.slot_of(1, 0), cache.slot_of(1, 1), cache.slot_of(2, 2)].count(None) == 0


def test_kernels_find_in_the_table_what_was_there_when_they_began_or_has_arrived():
    cache, disk = make_cache(5)
    use(cache, disk, 0, [1])
    use(cache, disk, 2, [3])
    assert cache.prefetch(1, [0]) == 1
    assert cache.kernel_reads.begin()
    expected = np.full((3, 4), ABSENT)
    expected[0, 1], expected[2, 3], expected[1, 0] = cache.slot_of(0, 1), cache.slot_of(2, 3), LOADING
    assert (cache.kernel_reads.slot_table == expected).all()
    disk.finish_all()
    expected[1, 0] = cache.slot_of(1, 0)
    assert (cache.kernel_reads.slot_table == expected).all()
    before = cache.stats()
    cache.kernel_reads.end(0, np.array([[[1, 1], [1, 1]]]))
    assert cache.stats().hits - before.hits == 1
    assert cache.stats().used_bytes == before.used_bytes
    cache.kernel_reads.begin()
    assert cache.kernel_reads.slot_table[1, 0] == cache.slot_of(1, 0)
    cache.kernel_reads.end(1, np.array([[[0, 0]], [[3, 3]]]))
    after = cache.stats()
    assert (after.hits - before.hits, after.used_bytes - before.used_bytes) == (3, SLAB_BYTES)
    cache.check_integrity()


def test_while_kernels_read_nobody_is_evicted():
    cache, disk = make_cache(2)
    use(cache, disk, 0, [0, 1])
    cache.kernel_reads.begin()
    assert cache.prefetch(1, [0]) == 0
    cache.kernel_reads.end(0, np.array([[[0, 1]]]))
    assert cache.prefetch(1, [0]) == 1


def test_uses_in_the_table_count_for_eviction():
    cache, disk = make_cache(2)
    use(cache, disk, 0, [0])
    use(cache, disk, 0, [1])
    cache.kernel_reads.begin()
    cache.kernel_reads.end(0, np.array([[[0]]]))
    use(cache, disk, 2, [0])
    assert cache.slot_of(0, 1) is None
    assert cache.slot_of(0, 0) is not None


def test_a_table_without_gaps_has_none():
    cache, disk = make_cache(12)
    for layer in range(3):
        use(cache, disk, layer, [0, 1, 2, 3])
    assert not cache.kernel_reads.begin()
    cache.kernel_reads.end(0, np.zeros((3, 1, 1), np.int64))
    assert cache.num_resident == cache.num_filled == 12


def test_wrong_drafts_for_layers_that_kernels_went_through_are_dropped():
    cache, disk = make_cache(6)
    assert cache.prefetch(0, [0]) == cache.prefetch(1, [1]) == cache.prefetch(2, [2]) == 1
    cache.kernel_reads.begin()
    cache.kernel_reads.end(0, np.array([[[3]], [[3]]]))
    assert started(disk) == [(2, 2)]
    cache.check_integrity()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_hits_misses_and_evictions_by_hand(num_slots):
    cache, disk = make_cache(num_slots)
    for expert in (0, 1, 0, 2, 0):
        use(cache, disk, 0, [expert])
    found = cache.stats()
    assert (found.hits, found.misses, found.evictions) == ((0, 5, 4) if num_slots == 1 else (2, 3, 0))
    assert (found.prefetched_bytes, found.wasted_bytes, found.late) == (0, 0, 0)
