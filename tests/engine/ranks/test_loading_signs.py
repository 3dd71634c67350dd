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
        signs = LoadingSigns(other, PATIENCE_S)

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
        LoadingSigns(other, PATIENCE_S).note_progress(1, 2)
        with pytest.raises(GroupError, match=r"has not sent message 'loading' within 0.05 s"):
            wait_until_loaded(first)


def test_signs_are_few_and_not_for_every_piece():
    with two_ends() as (first, other):
        signs = LoadingSigns(other, PATIENCE_S)
        for number in range(1000):
            signs.note_progress(number, 1000)
        signs.end()
        assert [first.receive_message("loading", PATIENCE_S) for _ in range(2)] == [b"", b"done"]


def test_a_rank_does_not_load_for_an_engine_that_has_ended():
    with two_ends() as (first, other):
        signs = LoadingSigns(other, PATIENCE_S)
        signs.note_progress(1, 9)
        first.say_farewell("the disk is full")
        with pytest.raises(GroupError, match="ended the group: the disk is full"):
            signs.note_progress(2, 9)
    with two_ends() as (first, other):
        signs = LoadingSigns(other, PATIENCE_S)
        first.close()
        with pytest.raises(GroupError, match="has closed the connection"):
            signs.note_progress(2, 9)
    with two_ends() as (first, other):
        first.send_message("pass", b"", PATIENCE_S)
        with pytest.raises(GroupError, match="sends 'pass' to a rank that still loads"):
            LoadingSigns(other, PATIENCE_S).note_progress(2, 9)
