from __future__ import annotations

import asyncio

import pytest

from moeflow.core.errors import QueueFullError, RequestError
from moeflow.server.guard.admission import Admission
from tests.server.conftest import connect

pytestmark = pytest.mark.anyio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_running_and_waiting_together_are_bounded():
    admission = Admission(max_queue=2)
    tickets = [admission.admit(1, max_num_seqs=3) for _ in range(5)]
    with pytest.raises(QueueFullError):
        admission.admit(1, max_num_seqs=3)
    tickets[0].close()
    tickets[0].close()
    admission.admit(1, max_num_seqs=3)
    assert admission.num_unfinished == 5


def test_a_request_is_all_in_or_all_out():
    admission = Admission(max_queue=2)
    admission.admit(3, max_num_seqs=2)
    with pytest.raises(QueueFullError):
        admission.admit(2, max_num_seqs=2)
    assert admission.num_unfinished == 3


def test_what_could_never_come_in_need_not_come_back():
    with pytest.raises(RequestError, match="takes 4") as caught:
        Admission(max_queue=2).admit(5, max_num_seqs=2)
    assert not isinstance(caught.value, QueueFullError)


def test_sequences_leave_one_by_one():
    admission = Admission(max_queue=0)
    ticket = admission.admit(3, max_num_seqs=3)
    ticket.finish_one()
    assert admission.num_unfinished == 2
    for _ in range(5):
        ticket.finish_one()
    ticket.close()
    assert admission.num_unfinished == 0


def test_the_longer_sequences_take_the_later_to_come_back():
    clock = Clock()
    admission = Admission(max_queue=0, clock=clock)
    for _ in range(100):
        ticket = admission.admit(1, max_num_seqs=1)
        clock.now += 20
        ticket.finish_one()
    admission.admit(1, max_num_seqs=1)
    with pytest.raises(QueueFullError) as caught:
        admission.admit(1, max_num_seqs=1)
    assert caught.value.retry_after_s == pytest.approx(20, rel=0.01)


def test_a_request_that_never_ran_teaches_nothing():
    clock = Clock()
    admission = Admission(max_queue=9, clock=clock)
    for _ in range(100):
        admission.admit(10, max_num_seqs=1).close()
    admission.admit(5, max_num_seqs=1)
    with pytest.raises(QueueFullError) as caught:
        admission.admit(10, max_num_seqs=1)
    assert caught.value.retry_after_s == 10  # ten places, a second each until something better is known


async def test_a_full_queue_is_429_with_a_time_to_come_back(make_app, engine):
    app = make_app(max_queue=1)
    engine.pause_after = 1
    body = {"prompt": "Hello", "max_tokens": 100}
    async with connect(app) as http:
        running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(5)]
        while len(engine.live) < 5:
            await asyncio.sleep(0.002)
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
        engine.pause_after = None
        assert [(await task).status_code for task in running] == [200] * 5
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert app.state.service.models.num_unfinished == 0
