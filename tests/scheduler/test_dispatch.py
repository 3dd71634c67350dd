"""Who gets the next request: the rule that supervisor and simulator share."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moeflow.scheduler.dispatch import BATCH_BACKLOG, Dispatch, EngineLoad

FREE = EngineLoad(num_interactive=0, prefill_tokens=0, num_places=2, tokens_of_pass=64)

LOADS = st.lists(
    st.none()
    | st.builds(
        EngineLoad,
        num_interactive=st.integers(0, 3),
        num_batch=st.integers(0, 9),
        num_waiting=st.integers(0, 1),
        prefill_tokens=st.integers(0, 80),
        num_places=st.just(2),
        tokens_of_pass=st.just(64),
        is_slow=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def test_free_engines_get_requests_in_turn():
    rule = Dispatch()
    assert [rule.choose([FREE] * 3) for _ in range(4)] == [0, 1, 2, 0]
    assert rule.choose([FREE, None, FREE]) == 2


def test_the_one_with_the_fewest_gets_it_and_no_slow_one_while_there_is_another():
    busy, slow = replace(FREE, num_interactive=1), replace(FREE, is_slow=True)
    assert Dispatch().choose([busy, FREE, FREE]) == 1
    assert Dispatch().choose([slow, busy]) == 1
    assert Dispatch().choose([slow, replace(busy, num_interactive=2)]) is None  # it is waited for the quick one
    assert Dispatch().choose([slow, None]) == 0


def test_nobody_gets_more_than_it_can_begin_with():
    full = replace(FREE, num_interactive=2)
    assert [
        Dispatch().choose([load])
        for load in (full, replace(FREE, num_waiting=1), replace(FREE, prefill_tokens=64), replace(FREE, num_batch=9))
    ] == [None, None, None, 0]
    assert Dispatch().choose([replace(full, num_batch=2 * BATCH_BACKLOG - 1)], is_batch=True) == 0
    assert Dispatch().choose([replace(full, num_batch=2 * BATCH_BACKLOG)], is_batch=True) is None


@given(st.lists(LOADS, max_size=4), st.booleans())
def test_whoever_is_chosen_runs_has_room_and_no_quick_one_has_fewer(turns, is_batch):
    rule = Dispatch()
    for loads in turns:
        chosen = rule.choose(loads, is_batch=is_batch)
        quick = [load for load in loads if load is not None and not load.is_slow]
        asked = quick or [load for load in loads if load is not None]
        free = [load for load in asked if load.has_room(is_batch=is_batch)]
        if chosen is None:
            assert not free
            continue
        assert loads[chosen] in free
        least = min(load.num_rivals(is_batch=is_batch) for load in free)
        assert loads[chosen].num_rivals(is_batch=is_batch) == least
