from __future__ import annotations

import pytest

from moeflow.server.jobs.lines import MAX_PROBLEMS, scan
from tests.server.jobs.requests import chat_line, completion_line, write_lines

LIMIT = 10_000


def problems(tmp_path, *lines: bytes, **limits) -> list[tuple[int, str]]:
    found = scan(write_lines(tmp_path / "in.jsonl", *lines), max_line_bytes=LIMIT, **limits)
    return [(problem.line, problem.message) for problem in found.problems]


def test_a_good_file_is_its_ids(tmp_path):
    path = write_lines(tmp_path / "in", chat_line("a"), b"  ", completion_line("b"))
    found = scan(path, max_line_bytes=LIMIT)
    assert found.problems == []
    assert list(found.result_ids) == ["a", "b"]
    assert found.result_ids["a"].startswith("batch_req_")


def test_ids_of_results_follow_the_content(tmp_path):
    first = scan(write_lines(tmp_path / "1", chat_line("a"), chat_line("b")), max_line_bytes=LIMIT).result_ids
    moved = scan(write_lines(tmp_path / "2", b"", b" " + chat_line("a")), max_line_bytes=LIMIT).result_ids
    changed = scan(write_lines(tmp_path / "3", chat_line("a", "Other")), max_line_bytes=LIMIT).result_ids
    assert first["a"] == moved["a"] != changed["a"]
    assert first["a"] != first["b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"nonsense", "the line is not valid JSON"),
        (b'{"a": NaN}', "the line holds NaN"),
        (b"[]", "no JSON object"),
        (b'{"custom_id": "x"}', "method: Field required"),
        (chat_line("x").replace(b"POST", b"GET"), "method"),
        (chat_line("x").replace(b"/v1/chat", b"/v2/chat"), "url"),
        (chat_line(""), "custom_id"),
        (chat_line("x").replace(b'"custom_id"', b'"customid"'), "did you mean 'custom_id'"),
        (chat_line("x").replace(b'"x"', b"7"), "custom_id"),
    ],
)
def test_what_is_no_request_is_told_with_its_line(tmp_path, line, reason):
    ((number, message),) = problems(tmp_path, chat_line("good"), line, chat_line("better"))
    assert number == 2
    assert reason in message


def test_an_id_that_is_used_twice(tmp_path):
    assert problems(tmp_path, chat_line("a"), chat_line("b"), chat_line("a", "other")) == [
        (3, "custom_id 'a' is that of line 1, too")
    ]


def test_a_file_for_two_endpoints(tmp_path):
    ((number, message),) = problems(tmp_path, chat_line("a"), completion_line("b"), endpoint="/v1/chat/completions")
    assert (number, "the batch is for /v1/chat/completions" in message) == (2, True)


def test_an_empty_file(tmp_path):
    assert problems(tmp_path, b"", b" ") == [(1, "the file holds no request")]


def test_too_many_and_too_long(tmp_path):
    assert problems(tmp_path, chat_line("a"), chat_line("b"), chat_line("c"), max_lines=2) == [
        (3, "the file has more than 2 requests; split it")
    ]
    assert problems(tmp_path, chat_line("a"), chat_line("b", "x" * LIMIT)) == [(2, "the line is larger than 9.8 KiB")]


def test_not_every_problem_of_a_wrong_file_is_told(tmp_path):
    assert len(problems(tmp_path, *[b"x"] * 1000)) == MAX_PROBLEMS


def test_a_byte_order_mark_before_the_first_line_is_no_fault(tmp_path):
    path = write_lines(tmp_path / "in", b"\xef\xbb\xbf" + chat_line("a") + b"\r", chat_line("b"))
    found = scan(path, max_line_bytes=LIMIT)
    assert (list(found.result_ids), found.problems) == (["a", "b"], [])
    assert problems(tmp_path, chat_line("a"), b"\xef\xbb\xbf" + chat_line("b"))[0][0] == 2
