"""The newest lines of the log: whole, bounded, and as the log has them."""

from __future__ import annotations

import logging
import sys
import threading

import msgspec
import pytest

from moeflow.server import log_ring as log_ring_module
from moeflow.server.api import server_log
from moeflow.server.log_ring import MAX_LINES, LogRing
from tests.server.conftest import connect

HUGE = 5_000_000


@pytest.fixture
def ring(monkeypatch) -> LogRing:
    """A ring of the test's own, which has the lines of moeflow's loggers."""
    ring = LogRing()
    monkeypatch.setattr(server_log, "log_ring", lambda: ring)
    own = logging.getLogger("moeflow")
    level = own.level
    own.addHandler(ring)
    own.setLevel(logging.INFO)
    yield ring
    own.removeHandler(ring)
    own.setLevel(level)


def log(text: str, *args: object, level: int = logging.INFO, **fields: object) -> None:
    logging.getLogger("moeflow.test").log(level, text, *args, extra={"fields": fields} if fields else None)


@pytest.mark.anyio
async def test_a_client_gets_each_line_once(http, ring):
    log("one %d", 1)
    log("two", level=logging.WARNING, status=500, is_late=True, key="büro")
    first = (await http.get("/stats/log")).json()
    assert [(it["level"], it["logger"], it["message"], it["fields"]) for it in first["lines"]] == [
        ("info", "moeflow.test", "one 1", {}),
        ("warning", "moeflow.test", "two", {"status": 500, "is_late": True, "key": "büro"}),
    ]
    log("three")
    second = (await http.get("/stats/log", params={"after": first["newest"]})).json()
    assert ([it["message"] for it in second["lines"]], second["is_complete"]) == (["three"], True)
    third = (await http.get("/stats/log", params={"after": second["newest"]})).json()
    assert third == {"lines": [], "newest": second["newest"], "is_complete": True}


@pytest.mark.anyio
async def test_a_request_is_a_line_with_its_fields_and_without_its_prompt(make_app, ring):
    for log_prompts in (False, True):
        async with connect(make_app(log_prompts=log_prompts)) as http:
            await http.post("/v1/completions", json={"prompt": "a secret", "max_tokens": 2})
            (line,) = [it for it in (await http.get("/stats/log")).json()["lines"] if it["message"] == "request"]
        assert (line["fields"]["status"], line["fields"]["completion_tokens"]) == (200, 2)
        assert ("a secret" in str(line)) is log_prompts
        ring._lines.clear()


@pytest.mark.anyio
async def test_what_is_dropped_is_told(http, ring):
    log("first")
    after = (await http.get("/stats/log")).json()["newest"]
    for number in range(MAX_LINES + 5):
        log("line %d", number)
    found = (await http.get("/stats/log", params={"after": after})).json()
    assert (len(found["lines"]), found["is_complete"]) == (MAX_LINES, False)
    assert found["lines"][-1]["message"] == f"line {MAX_LINES + 4}"
    few = (await http.get("/stats/log", params={"after": found["newest"] - 10, "limit": 3})).json()
    assert ([it["message"] for it in few["lines"]], few["is_complete"]) == (
        [f"line {MAX_LINES + n}" for n in (2, 3, 4)],
        False,
    )
    for wrong in ({"limit": MAX_LINES + 1}, {"limit": 0}, {"after": -1}, {"after": "x"}):
        assert (await http.get("/stats/log", params=wrong)).status_code == 400


@pytest.mark.anyio
async def test_numbers_of_a_restarted_server_are_higher(http, ring, monkeypatch):
    log("of the first server")
    after = (await http.get("/stats/log")).json()["newest"]
    monkeypatch.setattr(log_ring_module.time, "time", lambda: after / 1000 + 1)
    second = LogRing()
    monkeypatch.setattr(server_log, "log_ring", lambda: second)
    second.take(ring.since(0))
    found = (await http.get("/stats/log", params={"after": after})).json()
    assert ([it["message"] for it in found["lines"]], found["is_complete"]) == (["of the first server"], False)


@pytest.mark.anyio
async def test_huge_lines_are_cut(http, ring):
    try:
        raise ValueError("x" * HUGE + " the end")
    except ValueError:
        logging.getLogger("moeflow.test").exception(
            "m" * HUGE, extra={"fields": {"error": "e" * HUGE, "prompt": ["p" * HUGE]}}
        )
    answer = await http.get("/stats/log")
    assert len(answer.content) < 20_000
    (line,) = answer.json()["lines"]
    assert line["message"].startswith("mmm")
    assert line["message"].endswith("…")
    assert line["exception"].endswith(" the end")
    assert {name: len(value) for name, value in line["fields"].items()} == {"error": 501, "prompt": 501}


@pytest.mark.anyio
async def test_a_key_gets_no_prompts_of_others(make_app, ring, tmp_path):
    (tmp_path / "keys.toml").write_text("[alice]\nkey = 'a'\n[bob]\nkey = 'b'\n")
    async with connect(make_app(api_keys_file=tmp_path / "keys.toml", log_prompts=True)) as http:
        await http.post("/v1/completions", json={"prompt": "a secret"}, headers={"x-api-key": "a"})
        for key, is_there in (("a", True), ("b", False)):
            lines = (await http.get("/stats/log", headers={"x-api-key": key})).json()["lines"]
            (line,) = [it for it in lines if it["message"] == "request" and it["fields"]["key"] == "alice"]
            assert ("a secret" in str(lines)) == ("prompt" in line["fields"]) == is_there


@pytest.mark.anyio
async def test_names_that_are_not_utf8_are_escaped(http, ring):
    name = b"model-\xff".decode(errors="surrogateescape")
    try:
        raise ValueError(name)
    except ValueError:
        # Not through a logger: pytest would keep the name, and its workers cannot send it.
        record = logging.LogRecord("moeflow.test", logging.ERROR, "", 0, "no %s", (name,), sys.exc_info())
        record.fields = {"path": name}
        ring.handle(record)
    (line,) = (await http.get("/stats/log")).json()["lines"]
    assert (line["message"], line["fields"]) == ("no model-\\udcff", {"path": "model-\\udcff"})
    msgspec.msgpack.encode(ring.since(0))  # as fronts send it


def test_a_line_that_cannot_be_written_harms_nothing(ring):
    ring.handle(logging.LogRecord("moeflow", logging.INFO, "", 0, "%d", ("no number",), None))
    log("next", odd=object())
    log("last")
    assert [line.message for line in ring.since(0)] == ["last"]


def test_threads_that_log_at_once_lose_and_mix_nothing(ring):
    threads = [threading.Thread(target=lambda n=n: [log(f"{n} {i}") for i in range(100)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = ring.since(0)
    assert len({line.message for line in lines}) == 800
    numbers = [line.number for line in lines]
    assert numbers == list(range(numbers[0], numbers[0] + 800))
