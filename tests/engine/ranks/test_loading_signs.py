"""A rank that loads is waited for as long as it comes further, and loads no further than somebody waits for it."""

from __future__ import annotations

import threading
import time

import pytest

from moeflow.core.errors import GroupError
from moeflow.engine.ranks import loading_signs
from moeflow.engine.ranks.loading_signs import LoadingSigns, wait_until_loaded
from tests.parallel.links import two_ends

PATIENCE_S = 30.0


def test_a_rank_that_comes_further_is_waited_for_beyond_the_silence(monkeypatch):
    monkeypatch.setattr(loading_signs, "SIGN_S", 0.0)
    monkeypatch.setattr(loading_signs, "SILENCE_S", 1.0)
    with two_ends() as (first, other):
        signs = LoadingSigns(other)

        def load() -> None:
            for number in range(12):
                signs.note_progress(number, 12)
                time.sleep(0.1)
            signs.end()

        loading = threading.Thread(target=load)
        loading.start()
        wait_until_loaded(first)
        loading.join()


def test_a_rank_that_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(loading_signs, "SILENCE_S", 0.05)
    with two_ends() as (first, other):
        LoadingSigns(other).note_progress(1, 2)
        with pytest.raises(GroupError, match=r"has not sent message 'loading' within 0.05 s"):
            wait_until_loaded(first)


def test_signs_are_few_and_not_for_every_piece():
    with two_ends() as (first, other):
        signs = LoadingSigns(other)
        for number in range(1000):
            signs.note_progress(number, 1000)
        signs.end()
        assert [first.receive_message("loading", PATIENCE_S) for _ in range(2)] == [b"", b"done"]


def load_long(signs: LoadingSigns) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        signs.note_progress(2, 9)


@pytest.mark.parametrize(
    ("leave", "complaint"),
    [
        (lambda first: first.say_farewell("the disk is full"), "ended the group: the disk is full"),
        (lambda first: first.close(), "has closed the connection"),
        (lambda first: first.send_message("pass", b""), "sends 'pass' where nothing is expected"),
    ],
    ids=["farewell", "close", "pass"],
)
def test_a_rank_does_not_load_for_an_engine_that_has_ended(leave, complaint):
    with two_ends() as (first, other):
        signs = LoadingSigns(other)
        signs.note_progress(1, 9)
        leave(first)
        with pytest.raises(GroupError, match=complaint):
            load_long(signs)
