"""Fields that clients of other servers send: each row of the table holds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from moeflow.core.errors import RequestError
from moeflow.server.api.chat.chat_objects import ChatRequest
from moeflow.server.api.completions.completion_objects import CompletionRequest
from moeflow.server.api.messages.message_request import MessageRequest
from moeflow.server.api.responses.response_request import ResponseRequest
from moeflow.server.api.schema.field_policy import FieldParts, Ignored, Mapped, Policy, Refused, Unset
from moeflow.server.api.schema.field_table import FIELD_TABLE
from moeflow.server.api.schema.left_out import MAX_NOTES, LeftOut, noting
from moeflow.server.api.schema.strict_model import StrictModel
from scripts.fields_page import PAGE, page
from tests.server.conftest import connect
from tests.server.thinking_model import thinking_model

HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TEXT = {"role": "assistant", "content": "Hi"}
RESULT = {"role": "tool", "content": "", "tool_call_id": "1"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY = (1, "x", True, ["x"], {"x": {"y": [None]}})
BODIES: dict[type[StrictModel], dict[str, Any]] = {
    ChatRequest: {"messages": [HELLO]},
    CompletionRequest: {"prompt": "Hello"},
    ResponseRequest: {"input": "Hello"},
    MessageRequest: {"messages": [HELLO], "max_tokens": 5},
}


def models() -> dict[str, type[StrictModel]]:
    """All request objects by name."""
    found: dict[str, type[StrictModel]] = {}
    waiting: list[type[StrictModel]] = [StrictModel]
    while waiting:
        for model in waiting.pop().__subclasses__():
            if model.__module__.startswith("moeflow."):
                found[model.__name__] = model
                waiting.append(model)
    return found


def meaning(request: StrictModel) -> Any:
    """What a request asks for."""
    if isinstance(request, CompletionRequest):
        return request.prompts(), request.to_sampling_params(), request.answer_form()
    if isinstance(request, ResponseRequest):
        asked = request.conversation((), request.offered_tools(()))
    else:
        asked = request.conversation()  # type: ignore[attr-defined]
    return asked.messages, asked.tools.allowed, asked.variables, asked.sampling, asked.form, asked.max_reasoning_tokens


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": [HELLO], **changes}


def message(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A conversation with one changed message at its end, behind the call of a result."""
    before = [HELLO, CALLS] if base["role"] == "tool" else [HELLO]
    return {"messages": [*before, {**base, **changes}]}


def call(**changes: Any) -> dict[str, Any]:
    return {"messages": [HELLO, {**CALLS, "tool_calls": [{**CALL, **changes}]}, RESULT]}


def thinking(is_on: bool, **others: Any) -> dict[str, Any]:
    return chat(chat_template_kwargs={"enable_thinking": is_on, "thinking": is_on}, **others)


SAME = [  # a request of a client, and ours
    (chat(keep_alive="5m"), chat()),
    (chat(keep_alive=-1), chat()),
    (chat(cache_prompt=True), chat()),
    (chat(id_slot=3), chat()),
    (chat(user="u", user_id=3, session_id="s", safety_identifier="x"), chat()),
    (chat(metadata={"a": {"b": 1}}, client_metadata={"x": [1]}), chat()),
    (chat(prompt_cache_key="k", prompt_cache_retention="24h", prompt_cache_options={"mode": "x"}), chat()),
    (chat(service_tier="flex", store=True, prediction={"type": "content", "content": "x"}), chat()),
    (chat(verbosity="low"), chat()),
    (chat(verbosity="medium"), chat()),
    (chat(verbosity="high"), chat()),
    (chat(function_call="auto", functions=[]), chat()),
    (chat(mirostat=0, typical_p=1.0, tfs_z=1, xtc_probability=0.0, dry_multiplier=0), chat()),
    (chat(stream_options={"include_obfuscation": False}, stream=True), chat(stream_options={}, stream=True)),
    (chat(reasoning={"effort": "high"}), chat(reasoning_effort="high")),
    (chat(reasoning={"effort": "low", "summary": "auto"}), chat(reasoning_effort="low")),
    (chat(reasoning={"max_tokens": 50}), chat(thinking_token_budget=50)),
    (chat(reasoning={"enabled": False, "exclude": False}), thinking(False)),
    (chat(reasoning={"effort": "low"}, reasoning_effort="high"), chat(reasoning_effort="high")),
    (chat(enable_thinking=False), thinking(False)),
    (chat(enable_thinking=True), thinking(True)),
    (chat(enable_thinking=True, chat_template_kwargs={"a": 1}), thinking(True) | chat(
        chat_template_kwargs={"enable_thinking": True, "thinking": True, "a": 1}
    )),
    (chat(think=False), thinking(False)),
    (chat(think="high"), chat(reasoning_effort="high")),
    (chat(thinking={"type": "disabled"}), thinking(False)),
    (chat(thinking={"type": "enabled", "budget_tokens": 9}), thinking(True, thinking_token_budget=9)),
    (chat(max_tokens=-1), chat()),
    (chat(max_completion_tokens=-1), chat()),
    (chat(max_tokens=3, max_completion_tokens=7), chat(max_tokens=7)),
    (chat(n_predict=7), chat(max_tokens=7)),
    (chat(n_predict=-1), chat()),
    (chat(n_predict=-1, max_tokens=7), chat(max_tokens=7)),
    (chat(n_predict=7, max_tokens=-1), chat(max_tokens=7)),
    (chat(num_predict=7), chat(max_tokens=7)),
    (chat(max_new_tokens=7), chat(max_tokens=7)),
    (chat(repeat_penalty=1.1), chat(repetition_penalty=1.1)),
    (chat(stop=""), chat()),
    (chat(options={"temperature": 0.5, "num_predict": 9, "stop": ["x"], "num_ctx": 4096, "seed": None}),
     chat(temperature=0.5, max_tokens=9, stop=["x"])),
    (chat(options={"num_predict": -1, "stop": ["x"]}, max_tokens=7, stop=""), chat(max_tokens=7, stop=["x"])),
    (chat(options={"repeat_penalty": 1.1, "num_predict": -2, "num_gpu": 99}), chat(repetition_penalty=1.1)),
    (chat(options={"temperature": 0.5}, temperature=0.25), chat(temperature=0.25)),
    (chat(response_format={"type": "json_object", "schema": SCHEMA}), chat(guided_json=SCHEMA)),
    (chat(json_schema=SCHEMA), chat(guided_json=SCHEMA)),
    (chat(json_schema=SCHEMA, response_format={"type": "text"}), chat(guided_json=SCHEMA)),
    (chat(json_schema={"required": ["b"]}, guided_json=SCHEMA), chat(guided_json=SCHEMA)),
    (chat(grammar='root ::= "a"'), chat(guided_grammar='root ::= "a"')),
    (chat(grammar="", json_schema=SCHEMA), chat(guided_json=SCHEMA)),
    (message(TEXT, reasoning="I think"), message(TEXT, reasoning_content="I think")),
    (message(TEXT, thinking="I think"), message(TEXT, reasoning_content="I think")),
    (message(TEXT, reasoning="a", reasoning_content="b"), message(TEXT, reasoning_content="b")),
    (message(TEXT, reasoning_details=[{"type": "reasoning.text", "text": "x"}]), message(TEXT)),
    (message(TEXT, thinking_blocks=[{"type": "thinking", "thinking": "x", "signature": ""}]), message(TEXT)),
    (message(TEXT, provider_specific_fields={"refusal": None}), message(TEXT)),
    (message(TEXT, function_call=None, audio=None, refusal=None, annotations=[], parsed={}), message(TEXT)),
    (message(TEXT, content=None), message(TEXT, content="")),
    (message({"role": "assistant"}), message(TEXT, content="")),
    (message(CALLS, content=None), message(CALLS)),
    (message(RESULT, content=None), message(RESULT)),
    (message(RESULT, tool_name="f"), message(RESULT, name="f")),
    (message(HELLO, id="msg_1", cache_control={"type": "ephemeral"}), message(HELLO)),
    (message(HELLO, content=[{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]),
     message(HELLO)),
    (call(index=0), call()),
    (call(provider_specific_fields={"thought_signature": "x"}, extra_content={"google": {}}), call()),
    (call(function={"name": "f", "arguments": "{}", "parsed_arguments": {}}), call()),
    (chat(tools=[{**TOOL, "cache_control": {"type": "ephemeral", "scope": "global"}}]), chat(tools=[TOOL])),
    (chat(tools=[{**TOOL, "function": {**TOOL["function"], "defer_loading": True}}]), chat(tools=[TOOL])),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "mine"), SAME)
def test_a_clients_request_means_the_same_as_ours(theirs, mine):
    assert meaning(ChatRequest.model_validate(theirs)) == meaning(ChatRequest.model_validate(mine))


@pytest.mark.anyio
async def test_every_such_request_is_answered():
    app, engine, _ = thinking_model()
    async with connect(app) as http:
        for theirs, _ in SAME:
            response = await http.post("/v1/chat/completions", json={**theirs, "n": 1})
            assert response.status_code == 200, (theirs, response.text)
            assert "x-moeflow-left-out" not in response.headers
    assert len(engine.submissions) == len(SAME)


def rows(kind: type[Policy]) -> list[tuple[type[StrictModel], str, Any]]:
    """The rows of one kind that hold for whole requests."""
    return [
        (model, name, policy) for model in BODIES for name, policy in model.policies.items() if isinstance(policy, kind)
    ]


@pytest.mark.parametrize(("model", "name", "policy"), rows(Ignored))
def test_ignored_fields_of_requests_change_nothing(model, name, policy):
    expected = meaning(model.model_validate(BODIES[model]))
    for value in ANY:
        assert meaning(model.model_validate({**BODIES[model], name: value})) == expected


@pytest.mark.parametrize(("model", "name", "policy"), rows(Mapped))
def test_other_names_are_checked_as_ours_are(model, name, policy):
    for value in ANY:
        outcomes = [outcome(model, {**BODIES[model], field: value}) for field in (name, policy.to)]
        assert outcomes[0] == outcomes[1]


def outcome(model: type[StrictModel], body: dict[str, Any]) -> Any:
    """What a request means, or that it is an error."""
    try:
        return meaning(model.model_validate(body))
    except (ValueError, RequestError):
        return None


@pytest.mark.parametrize(("model", "name", "policy"), rows(Refused))
def test_refusals_give_the_reason(model, name, policy):
    expected = meaning(model.model_validate(BODIES[model]))
    for value in (None, *policy.harmless):
        assert meaning(model.model_validate({**BODIES[model], name: value})) == expected
    with pytest.raises(ValueError, match=f"{name} is not supported: {re.escape(policy.reason)}"):
        model.model_validate({**BODIES[model], name: {"unlikely": 1}})


@pytest.mark.parametrize("class_name", FIELD_TABLE)
def test_the_table_is_about_fields_that_exist_or_do_not(class_name):
    model = models()[class_name]
    own = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, policy in FIELD_TABLE[class_name].items():
        assert (name in own) == isinstance(policy, Unset), name
        targets = policy.rows.values() if isinstance(policy, FieldParts) else (policy,)
        for target in targets:
            heirs = [heir for heir in models().values() if issubclass(heir, model)]
            if isinstance(target, Mapped):
                assert any(target.to in (field.alias or key for key, field in heir.model_fields.items())
                           for heir in heirs), name  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "param", "reason"),
    [
        ({"options": {"temperatur": 1}}, "options", "unknown field 'temperatur' in options"),
        ({"options": []}, "options", "must be an object"),
        ({"options": {"num_ctx": "4096"}}, "options", "options.num_ctx must be a number. This server ignores it"),
        ({"options": {"use_mmap": 1}}, "options", "options.use_mmap must be a boolean. This server ignores it"),
        ({"n_predict": "x", "max_tokens": 3}, "n_predict", "valid integer"),
        ({"options": {"temperature": 9}, "temperature": 1}, "options", "less than or equal to 2"),
        ({"options": {"temperature": "hot"}}, "temperature", "number"),
        ({"reasoning": {"effort": "huge"}}, "reasoning_effort", "Input should be"),
        ({"reasoning": {"exclude": True}}, "reasoning", "reasoning.exclude is not supported"),
        ({"enable_thinking": "yes"}, "enable_thinking", "true or false"),
        ({"thinking": {"type": "deep"}}, "thinking", "enabled, adaptive or disabled"),
        ({"verbosity": "loud"}, "verbosity", "low, medium or high"),
        ({"mirostat": 2}, "mirostat", "no such sampler"),
        ({"temperatur": 1}, "temperatur", "did you mean 'temperature'?"),
        ({"messages": [{**HELLO, "contents": "x"}]}, "messages[0].contents", "did you mean 'content'?"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "only messages of an assistant"),
    ],
)
@pytest.mark.anyio
async def test_other_values_are_refused_by_name(http, changes, param, reason):
    response = await http.post("/v1/chat/completions", json=chat(**changes))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.anyio
async def test_unknown_fields_may_be_left_out_by_name(make_app):
    body = {"messages": [{**HELLO, "mood": 1}], "new_sampler": {"x": 1}, "line\r\nbreak, ü": 2, "mirostat": 0}
    body["options"] = {"new_option": True, "seed": 1}
    body[" "] = body[f"{'x' * 79} y"] = 3
    async with connect(make_app(unknown_fields="ignore")) as http:
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-moeflow-left-out"] == ", ".join(
            ("new_sampler", "line??break? ?", "options.new_option", "?", "x" * 79, "mood")
        )
        plain = await http.post("/v1/chat/completions", json=chat())
        assert "x-moeflow-left-out" not in plain.headers
        refused = await http.post("/v1/chat/completions", json=chat(mirostat=2))
        assert refused.status_code == 400  # a field of the table is not unknown
    async with connect(make_app()) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
        chat(
            tools=[TOOL],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        ),
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    ],
)
def test_fields_of_another_form_are_not_noted_as_unknown(body):
    request = LeftOut("ignore")
    with noting(request):
        assert meaning(ChatRequest.model_validate(body)) == meaning(ChatRequest.model_validate(body))
    assert request.notes == []


def test_notes_of_a_request_are_few_and_short():
    request = LeftOut("ignore")
    with noting(request):
        ChatRequest.model_validate(chat(**{f"{number}-{'x' * 500}": 1 for number in range(MAX_NOTES + 9)}))
    assert len(request.notes) == MAX_NOTES
    assert max(map(len, request.notes)) <= 80


def test_the_page_lists_the_table():
    assert PAGE.read_text() == page(FIELD_TABLE), "run scripts/fields_page.py"
    for row in (
        "| `keep_alive` | ignored: models stay loaded while memory allows |",
        "| `options.num_predict` | as `max_tokens` |",
        "| `max_tokens` | `-1`, `-2`: not set |",
        "| `use_beam_search` | refused: this server has no such sampler (accepted: `false`) |",
    ):
        assert row in PAGE.read_text()
