"""Futures: set once, read by all, and cancelled only before they begin."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from moeflow.pipeline.runtime.future import Future


def test_a_value_is_there_for_all_who_wait():
    future = Future[int]()
    got: list[int] = []
    waiters = [threading.Thread(target=lambda: got.append(future.result())) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    assert future.begin()
    future.set_result(7)
    for waiter in waiters:
        waiter.join()
    assert got == [7] * 5


def test_only_one_begins_it_and_what_has_begun_cannot_be_cancelled():
    future = Future[int]()
    assert future.begin()
    assert not future.begin()
    assert not future.cancel()
    assert not future.is_done


def test_cancelled_before_it_begins():
    future = Future[int]()
    called: list[Future[int]] = []
    future.on_done(called.append)
    assert future.cancel()
    assert not future.cancel()
    assert not future.begin()
    assert called == [future]
    assert isinstance(future.error, CancelledError)
    with pytest.raises(CancelledError):
        future.result()


def test_an_error_is_the_same_for_all_and_keeps_nothing_alive():
    class Held(Future[int]):
        pass  # unlike Future, may be referred to weakly

    future, error = Held(), ValueError("bad")
    future.begin()
    future.set_error(error)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad") as caught:
            future.result()
        assert caught.value is error
    del caught, error
    reference = weakref.ref(future)
    gc.disable()
    try:
        del future
        assert reference() is None
    finally:
        gc.enable()


def test_waiting_ends_after_the_given_time():
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        Future[int]().result(timeout_s=0.01)


def test_callbacks_run_once_each_in_order_and_a_bad_one_harms_nobody(caplog):
    future = Future[int]()
    calls: list[str] = []

    def bad(_: Future[int]) -> None:
        raise RuntimeError("in a callback")

    future.on_done(lambda f: calls.append(f"first {f.result()}"))
    future.on_done(bad)
    future.on_done(lambda _: calls.append("second"))
    future.begin()
    future.set_result(1)
    future.on_done(lambda _: calls.append("late"))
    assert calls == ["first 1", "second", "late"]
    assert "a callback of a future failed" in caplog.text


def test_callbacks_added_while_it_finishes_are_neither_lost_nor_doubled():
    for _ in range(200):
        future, calls = Future[int](), []
        future.begin()
        adder = threading.Thread(
            target=lambda f=future, c=calls: [f.on_done(lambda _, i=i: c.append(i)) for i in range(20)]
        )
        adder.start()
        future.set_result(0)
        adder.join()
        assert sorted(calls) == list(range(20))
