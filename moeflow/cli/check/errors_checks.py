"""Checks of refusals, and of a server that lives on after them."""

from __future__ import annotations

from typing import Any

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.forms import ChatForm
from moeflow.cli.check.openai_shapes import ErrorAnswer
from moeflow.cli.check.outcome import Skipped, expect
from moeflow.cli.check.target import Answer, Target

_FORM = ChatForm()
_LARGE_BYTES = 33 << 20
_WRONG_TYPES: tuple[dict[str, Any], ...] = (
    {"messages": "Hello"},
    {"messages": []},
    {"messages": [{"role": "nobody", "content": "Hello"}]},
    {"max_tokens": "many"},
    {"temperature": "hot"},
    {"temperature": -1},
    {"stream": "perhaps"},
    {"tools": "weather"},
)


def _check_refusal(answer: Answer, *statuses: int) -> None:
    expected = " or ".join(map(str, statuses))
    expect(answer.status in statuses, f"the status must be {expected}, not {answer.shown()}")
    answer.read(ErrorAnswer)


def bad_json(target: Target) -> None:
    """A body that is no JSON gets 400 and an error object."""
    _check_refusal(target.send("POST", _FORM.path, b'{"model": "x", "messages": ['), 400)


def missing_messages(target: Target) -> None:
    """A request without messages gets 400 and an error object."""
    _check_refusal(target.post(_FORM.path, {"model": target.model}), 400)


def wrong_types(target: Target) -> None:
    """Fields of wrong types or ranges get 400 and an error object."""
    for fields in _WRONG_TYPES:
        _check_refusal(target.post(_FORM.path, _FORM.body(target, **fields)), 400)


def refused_stream(target: Target) -> None:
    """A stream that is refused gets the status and JSON of any refusal."""
    _check_refusal(target.post(_FORM.path, _FORM.body(target, messages=[], stream=True)), 400)


def unknown_model(target: Target) -> None:
    """A model that is not there gets 404 and an error object."""
    _check_refusal(target.post(_FORM.path, _FORM.body(target, model="no-such-model")), 404)


def too_long_prompt(target: Target) -> None:
    """A prompt longer than the context gets 400 and an error object."""
    if target.max_model_len is None:
        raise Skipped("the list of models has no max_model_len")
    words = " ".join(f"{number % 10}" for number in range(target.max_model_len + 1))
    _check_refusal(target.post(_FORM.path, _FORM.body(target, messages=[{"role": "user", "content": words}])), 400, 413)


def wrong_key(target: Target) -> None:
    """A wrong key gets 401 and an error object."""
    answer = target.send("GET", "/v1/models", headers={"Authorization": "Bearer wrong-key"})
    if answer.status == 200:
        raise Skipped("the server needs no key")
    _check_refusal(answer, 401)


def unknown_path(target: Target) -> None:
    """An unknown path gets 404."""
    answer = target.post("/v1/no-such-path", {})
    expect(answer.status == 404, f"the status must be 404, not {answer.shown()}")


def wrong_method(target: Target) -> None:
    """A method that a path lacks gets 405, or 404."""
    answer = target.send("PUT", _FORM.path)
    expect(answer.status in (404, 405), f"the status must be 405, not {answer.shown()}")


def large_body(target: Target) -> None:
    """A request padded to 33 MiB gets an answer, or a refusal with an error object."""
    body = b'{"messages": ' + b" " * _LARGE_BYTES + b"1}"
    answer = target.send("POST", _FORM.path, body)
    _check_refusal(answer, 400, 413)


def closed_stream(target: Target) -> None:
    """After a client closes a stream, the next request gets its answer."""
    target.read_one_event_and_leave(_FORM.path, _FORM.body(target, max_tokens=64))
    _FORM.ask(target, again=True, max_tokens=1)


def errors_checks() -> list[Check]:
    """Return the checks."""
    area, source = Area("errors", _FORM.path), "OpenAI API reference: errors"
    runs = (
        *(bad_json, missing_messages, wrong_types, refused_stream, unknown_model, too_long_prompt),
        *(wrong_key, unknown_path, wrong_method, large_body, closed_stream),
    )
    return [area.check(run, source) for run in runs]
