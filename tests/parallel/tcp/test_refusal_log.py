"""Refusals are logged once a minute for each host and reason, and memory does not grow with their number."""

from __future__ import annotations

import logging

from moeflow.parallel.tcp.refusal_log import RefusalLog


def test_repeated_refusals_are_warned_of_once_a_minute(caplog):
    now_s = 100.0
    caplog.set_level(logging.DEBUG)
    log = RefusalLog(logging.getLogger("x"), lambda: now_s)
    for port in (1, 2, 3):
        log.note("a", f"a:{port} is refused", "it is late")
    log.note("a", "a:4 is refused", "it is wrong")
    log.note("b", "b:1 is refused", "it is late")
    now_s += 59
    log.note("a", "a:5 is refused", "it is late")
    now_s += 1
    log.note("a", "a:6 is refused", "it is late")
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [
        ("WARNING", "a:1 is refused: it is late"),
        ("DEBUG", "a:2 is refused: it is late"),
        ("DEBUG", "a:3 is refused: it is late"),
        ("WARNING", "a:4 is refused: it is wrong"),
        ("WARNING", "b:1 is refused: it is late"),
        ("DEBUG", "a:5 is refused: it is late"),
        ("WARNING", "a:6 is refused: it is late"),
    ]


def test_the_oldest_are_forgotten_when_there_are_many(caplog):
    log = RefusalLog(logging.getLogger("x"), lambda: 0.0)
    for number in range(1001):
        log.note(str(number), "somebody is refused", "it is late")
    caplog.clear()
    log.note("1000", "the newest is refused", "it is late")
    log.note("0", "the oldest is refused", "it is late")
    assert caplog.messages == ["the oldest is refused: it is late"]
    assert len(log._told_s) == 1000
