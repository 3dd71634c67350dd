"""Records of requests keep within their memory: the oldest finished ones go first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.observation import NOT_COMPUTED
from moeflow.core.request import Request, RequestStatus
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.observing.request_records import PASS, RequestRecord, RequestRecords


def request(name: str, num_tokens: int = 4) -> Request:
    return Request(name, list(range(num_tokens)), SamplingParams(), max_tokens=4)


def finish(one: Request) -> None:
    one.status = RequestStatus.FINISHED


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 3)), min_size=1, max_size=10
    )
)
def test_the_last_write_of_a_position_counts(writes):
    record = RequestRecord(request("one", 41), num_layers=2, num_experts=4, top_k=1)
    expected = np.full((41, 2, 1), NOT_COMPUTED, np.uint16)
    for positions, expert in writes:
        routes = np.full((len(positions), 2, 1), expert, np.uint16)
        record.write(np.array(positions), routes)
        for position in positions:
            expected[position] = expert
    found = np.frombuffer(record.tokens().experts, "<u2").reshape(41, 2, 1)
    assert (found == expected).all()


def test_a_group_of_layers_writes_only_its_own():
    record = RequestRecord(request("one"), num_layers=3, num_experts=4, top_k=1)
    record.write(np.array([1]), np.full((1, 2, 1), 3, np.uint16), slice(1, 3))
    found = np.frombuffer(record.tokens().experts, "<u2").reshape(4, 3)
    assert found[1].tolist() == [NOT_COMPUTED, 3, 3]
    assert (found[[0, 2, 3]] == NOT_COMPUTED).all()


def test_only_the_last_finished_requests_are_kept():
    records = RequestRecords(1, 2, 1, max_finished=3)
    made = [request(str(number)) for number in range(6)]
    for one in made:
        records.of(one)
    for one in made[:5]:
        finish(one)
        records.settle()
    assert [name for name in "012345" if records.find(name)] == ["2", "3", "4", "5"]


def test_memory_is_bounded_and_running_requests_lose_routes_last():
    records = RequestRecords(4, 8, 2, max_bytes=50_000)
    made = [request(str(number), 1000) for number in range(6)]  # 16 kB of routes each
    for number, one in enumerate(made):
        records.of(one).write(np.arange(1000), np.zeros((1000, 4, 2), np.uint16))
        if number < 4:
            finish(one)
        records.settle()
        assert records.num_bytes <= 50_000
    assert records.find("0") == []
    (running,) = records.find("5")
    assert len(running.tokens().experts) == 1000 * 4 * 2 * 2
    records.of(made[5]).write(np.arange(2000), np.zeros((2000, 4, 2), np.uint16))
    records.of(made[4]).write(np.arange(2000), np.zeros((2000, 4, 2), np.uint16))
    records.settle()
    assert records.num_bytes <= 50_000
    assert not any(records.find(str(number)) for number in range(4))
    (oldest,), (newest,) = records.find("4"), records.find("5")
    assert oldest.tokens().experts == b""
    assert newest.tokens().experts != b""
    oldest.write(np.arange(9), np.zeros((9, 4, 2), np.uint16))
    assert oldest.tokens().experts == b""  # not in part


def test_a_finished_request_keeps_its_tokens_alone():
    records, one = RequestRecords(1, 2, 1), request("one")
    record = records.of(one)
    one.output_token_ids += [7, 8]
    one.num_cached_tokens, one.queued_s = 3, 0.5
    rows = np.array([(10.0, 0.25, 4, 9, True, 2, 1, 0.125, 4096)] * 20, PASS)
    record.add_passes(rows.view(np.uint8).reshape(20, PASS.itemsize))
    finish(one)
    records.settle()
    one.output_token_ids.append(9)
    sight, tokens = record.sight(), record.tokens()
    assert tokens.token_ids == [0, 1, 2, 3, 7, 8]
    assert (sight.is_running, sight.num_prompt_tokens, sight.num_output_tokens) == (False, 4, 2)
    assert (sight.num_cached_tokens, sight.queued_s) == (3, 0.5)
    found = sight.passes[-1]
    assert len(sight.passes) == 20
    assert found.start_s == 10.0
    assert found.duration_s == pytest.approx(0.25)
    assert (found.num_tokens, found.num_pass_tokens, found.is_prompt) == (4, 9, True)
    assert (found.num_drafted, found.num_accepted, found.stall_s, found.read_bytes) == (2, 1, 0.125, 4096)
