"""Algorithm 2 against a restatement of its sentences, with nothing shared and everything counted anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.scheduler.offline_batching import form_micro_batches


def restated(lengths: list[int], num_micro_batches: int, max_requests: int, gen_len: int, cache_size: int):
    """Place each request by looking at all that were placed before; numbers stand for requests."""
    place: dict[int, int] = {}
    waiting = []
    for request in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        members = [[r for r in place if place[r] == m] for m in range(num_micro_batches)]
        still_open = [m for m in range(num_micro_batches) if len(members[m]) < max_requests]
        if still_open:
            best = min(still_open, key=lambda m: (sum(lengths[r] for r in members[m]), m))
            prompts = sum(lengths[r] for r in members[best])
            if prompts + lengths[request] + (len(members[best]) + 1) * gen_len <= cache_size:
                place[request] = best
                continue
        waiting.append(request)
    return {frozenset(r for r in place if place[r] == m) for m in place.values()}, waiting


@given(
    lengths=st.lists(st.integers(1, 30), max_size=25),
    num_micro_batches=st.integers(1, 5),
    max_requests=st.integers(1, 8),
    gen_len=st.integers(1, 12),
    cache_size=st.integers(1, 200),
)
def test_micro_batches_are_those_of_the_algorithm(lengths, num_micro_batches, max_requests, gen_len, cache_size):
    formed, waiting = form_micro_batches(
        range(len(lengths)),
        lengths.__getitem__,
        num_micro_batches=num_micro_batches,
        max_requests=max_requests,
        gen_len=gen_len,
        cache_size=cache_size,
    )
    expected, expected_waiting = restated(lengths, num_micro_batches, max_requests, gen_len, cache_size)
    assert {frozenset(micro_batch) for micro_batch in formed} == expected
    assert waiting == expected_waiting
    assert sorted([*waiting, *(r for micro_batch in formed for r in micro_batch)]) == list(range(len(lengths)))
    for micro_batch in formed:
        assert len(micro_batch) <= max_requests
        assert sum(lengths[r] for r in micro_batch) + len(micro_batch) * gen_len <= cache_size
        assert micro_batch == sorted(micro_batch, key=lambda r: (-lengths[r], r))


def test_the_longest_are_spread_and_full_micro_batches_close_first():
    formed, waiting = form_micro_batches(
        [5, 9, 1, 7, 3], int, num_micro_batches=2, max_requests=3, gen_len=1, cache_size=100
    )
    assert (formed, waiting) == ([[9, 3, 1], [7, 5]], [])


def test_who_would_overflow_waits_though_a_shorter_one_still_fits():
    formed, waiting = form_micro_batches([4, 8, 9], int, num_micro_batches=1, max_requests=3, gen_len=2, cache_size=18)
    assert (formed, waiting) == ([[9, 4]], [8])
