"""Block tables: reservation is all or nothing, and the checker notices what it is there to notice."""

from __future__ import annotations

import pytest

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.kvcache.block_tables import BlockTables


def make_request(prompt: list[int]) -> Request:
    return Request("r", prompt, SamplingParams(), 4)


def test_a_reservation_that_does_not_fit_changes_nothing():
    tables = BlockTables(num_blocks=3, block_size=4)
    request = make_request([1] * 9)
    tables.open(request)
    assert tables.reserve(request, 5)
    assert not tables.reserve(request, 13)
    assert not tables.reserve(request, 12, keep_available=1)
    assert tables.num_available == 1
    assert tables.reserve(request, 12)
    tables.check_integrity()


def test_a_full_match_leaves_one_token_to_compute():
    tables = BlockTables(num_blocks=4, block_size=4)
    first = make_request([1] * 8)
    tables.open(first)
    assert tables.reserve(first, 8)
    tables.share(first, 8)
    tables.confirm_pass()
    tables.close(first)
    assert tables.num_cached == 2
    assert tables.open(make_request([1] * 8)) == 4


def test_twins_are_merged_once_both_are_computed():
    tables = BlockTables(num_blocks=8, block_size=4)
    requests = [make_request([1] * 5) for _ in range(2)]
    for request in requests:
        tables.open(request)  # both before either is shared: two private copies
        assert tables.reserve(request, 5)
    for request in requests:
        tables.share(request, 5)
    assert tables.num_used == 4
    tables.confirm_pass()
    for request in requests:
        request.num_computed_tokens = 5
        tables.share(request, 5)
    assert tables.num_used == 3
    assert tables.block_ids(requests[0], 4) == tables.block_ids(requests[1], 4)
    tables.check_integrity()


@pytest.mark.parametrize("damage", ["lost", "double", "miscounted"])
def test_the_checker_notices_damage(damage):
    tables = BlockTables(num_blocks=4, block_size=2)
    request = make_request([1] * 4)
    tables.open(request)
    assert tables.reserve(request, 4)
    tables.share(request, 2)
    tables.check_integrity()
    if damage == "lost":
        tables._free.pop()
    elif damage == "double":
        tables._free.append(tables.block_ids(request, 4)[1])
    else:
        next(tables.tree.nodes()).num_users += 1
    with pytest.raises(AssertionError):
        tables.check_integrity()
