"""Requests of Codex: its tools come back in their own forms, its items replay, hosted parts are left out and named."""

from __future__ import annotations

import copy
import json
import typing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent

from moeflow.server.api.responses.offered_tools import Called, flat_name
from moeflow.server.api.responses.response_object import RESPONSE_EVENTS, ResponseObject
from moeflow.server.api.responses.sealed import sealed, unsealed
from moeflow.server.api.responses.written_calls import written_call
from moeflow.server.api.schema.left_out import LeftOut, noting
from moeflow.text.tokenizer import Tokenizer
from tests.server.conftest import connect
from tests.server.conversing import prompt_of
from tests.server.fake_client import REPLY, FakeClient
from tests.server.openai_objects import check_no_extras
from tests.server.responses.codex_client import (
    AGENTS,
    APPLY_PATCH,
    EXEC,
    HOSTED,
    OPENING,
    PATCH,
    TOOL_SEARCH,
    TOOLS,
    done_items,
    events_of,
    written,
)
from tests.server.test_tools import says
from tests.server.thinking_model import thinking_model
from tests.tiny_mixtral import EOS

pytestmark = pytest.mark.anyio
_OFFICIAL = {
    kind: model
    for model in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    for kind in typing.get_args(model.model_fields["type"].annotation)
}
LEFT_OUT = "x-moeflow-left-out"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeClient:
    return FakeClient(tokenizer, max_model_len=100_000)


def check_events(events: list[dict]) -> None:
    """Each event is of the document's type and of the official client's, which does not list all that OpenAI sends."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        (model,) = [model for model in RESPONSE_EVENTS if event["type"] in str(model.model_fields["type"].annotation)]
        model.model_validate(event, strict=True, extra="forbid")
        plain = copy.deepcopy(event)
        items = [plain["item"]] if "item" in plain else plain.get("response", {}).get("output", [])
        for item in items:
            if item["type"] == "custom_tool_call":
                del item["status"]
        check_no_extras(_OFFICIAL[event["type"]].model_validate_json(json.dumps(plain), strict=True))


@pytest.mark.parametrize(
    ("call", "fields", "event", "field"),
    [
        (
            written("exec_command", {"cmd": "ls"}),
            {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
            "response.function_call_arguments",
            "arguments",
        ),
        (
            written("apply_patch", {"input": PATCH}),
            {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
            "response.custom_tool_call_input",
            "input",
        ),
        (
            written("multi_agent_v1__close_agent", {"target": "a"}),
            {
                "type": "function_call",
                "name": "close_agent",
                "namespace": "multi_agent_v1",
                "arguments": '{"target": "a"}',
            },
            "response.function_call_arguments",
            "arguments",
        ),
        (
            written("multi_agent_v1__note", {"input": "n"}),
            {"type": "custom_tool_call", "name": "note", "namespace": "multi_agent_v1", "input": "n"},
            "response.custom_tool_call_input",
            "input",
        ),
        (
            written("tool_search", {"query": "agents"}),
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "agents"}},
            None,
            None,
        ),
        (
            written("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}),
            {
                "type": "local_shell_call",
                "action": {
                    "type": "exec",
                    "command": ["ls", "-l"],
                    "env": {},
                    "timeout_ms": 5,
                    "user": None,
                    "working_directory": None,
                },
            },
            None,
            None,
        ),
        (
            written("unknown", {}),
            {"type": "function_call", "name": "unknown", "arguments": "{}"},
            "response.function_call_arguments",
            "arguments",
        ),
    ],
)
@pytest.mark.parametrize("drafts_per_pass", [0, 7])
async def test_calls_come_back_in_the_form_of_their_tools(
    http, engine, tokenizer, call, fields, event, field, drafts_per_pass
):
    says(engine, tokenizer, call)
    engine.drafts_per_pass = drafts_per_pass
    events = await events_of(http, OPENING)
    check_events(events)
    (item,) = done_items(events)
    assert {**item, **fields} == item
    assert item["status"] == "completed"
    assert item["call_id"].startswith("call_")
    kinds = [one["type"] for one in events]
    inner = [] if event is None else [f"{event}.delta", f"{event}.done"]
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *inner,
        "response.output_item.done",
        "response.completed",
    ]
    if event is not None:
        deltas = "".join(one["delta"] for one in events if one["type"] == f"{event}.delta")
        (done,) = [one for one in events if one["type"] == f"{event}.done"]
        assert deltas == done[field] == item[field]
    whole = (
        await http.post("/v1/responses", json={"input": OPENING, "tools": TOOLS, "max_output_tokens": 2000})
    ).json()
    assert ResponseObject.model_validate(whole, strict=True)
    assert {**whole["output"][0], **fields} == whole["output"][0]


async def test_stored_calls_replay_as_they_came(http, engine, tokenizer):
    says(
        engine,
        tokenizer,
        "".join(
            [
                written("apply_patch", {"input": PATCH}),
                written("local_shell", {"command": "ls"}),
                written("tool_search", {"query": "x"}),
            ]
        ),
    )
    events = await events_of(http, OPENING, store=True)
    response = events[-1]["response"]
    again = await http.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
    replayed = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: ")]
    assert replayed[-1]["response"] == response
    done = "response.output_item.done"
    assert [one["item"] for one in replayed if one["type"] == done] == done_items(events)
    assert response["output"][1]["action"]["command"] == ["bash", "-lc", "ls"]
    for call_id in [item["call_id"] for item in response["output"]]:
        result = {"type": "custom_tool_call_output", "call_id": call_id, "output": "ok"}
        followed = await http.post("/v1/responses", json={"previous_response_id": response["id"], "input": [result]})
        assert followed.status_code == 200, followed.text
    listed = (await http.get(f"/v1/responses/{response['id']}/input_items")).json()
    assert len(listed["data"]) == len(OPENING)


SCRIPT = [
    ("exec_command", {"cmd": "cat notes.txt"}, "function_call_output", "the red fox"),
    ("apply_patch", {"input": PATCH}, "custom_tool_call_output", [{"type": "input_text", "text": "Updated."}]),
    ("tool_search", {"query": "agents"}, "tool_search_output", None),
    ("multi_agent_v1__close_agent", {"target": "a"}, "function_call_output", {"content": "gone", "success": False}),
    ("local_shell", {"command": ["make", "test"]}, "function_call_output", "1 passed"),
    ("multi_agent_v1__note", {"input": 'line "1"\nline 2'}, "custom_tool_call_output", "noted"),
    ("exec_command", {"cmd": "git diff"}, "function_call_output", [{"type": "input_text", "text": "+ü"}]),
    ("apply_patch", {"input": PATCH}, "custom_tool_call_output", "Failed."),
    ("exec_command", {"cmd": "cat notes.txt"}, "function_call_output", ""),
]


async def test_a_conversation_of_ten_turns(http, engine, tokenizer):
    """The client sends items back, with results. The model sees each call in its own words."""
    items = [*OPENING]
    for name, arguments, kind, result in SCRIPT:
        call = written(name, arguments)
        says(engine, tokenizer, f"Next.{call}" if name == "exec_command" else call)
        events = await events_of(http, items, tools=[tool for tool in TOOLS if tool != AGENTS])
        output = done_items(events)
        answered = {"type": kind, "call_id": output[-1]["call_id"], "status": "completed"}
        if kind == "tool_search_output":
            items += [*output, {**answered, "execution": "client", "tools": [AGENTS]}]
        else:
            items += [*output, {**answered, "output": result}]
    says(engine, tokenizer, "All done.")
    events = await events_of(http, items, tools=[tool for tool in TOOLS if tool != AGENTS])
    check_events(events)
    assert done_items(events)[0]["content"][0]["text"] == "All done."
    prompt = prompt_of(engine, tokenizer)
    place = prompt.index("Do it.")
    for name, arguments, _, result in SCRIPT:
        place = prompt.index(written(name, arguments), place)
        match result:
            case None:
                said = "Found tools: multi_agent_v1__close_agent, multi_agent_v1__note"
            case str():
                said = result
            case list():
                said = result[0]["text"]
            case _:
                said = result["content"]
        place = prompt.index(said, place)
    assert prompt.count("You are a coding agent.") == 1
    await check_stored(http, engine, tokenizer, items, prompt)


async def check_stored(http, engine, tokenizer, items, prompt):
    """A conversation that the server keeps is the same as one that the client sends whole."""
    tools = [tool for tool in TOOLS if tool != AGENTS]
    events = await events_of(http, items[:-1], tools=tools, store=True, instructions="First.")
    response_id = events[-1]["response"]["id"]
    listed = (await http.get(f"/v1/responses/{response_id}/input_items", params={"order": "asc", "limit": 100})).json()
    assert [item["type"] for item in listed["data"]] == [item["type"] for item in items[:-1]]
    await events_of(http, items[-1:], tools=tools, previous_response_id=response_id)
    kept = prompt_of(engine, tokenizer)
    place = kept.index("All done.")
    assert prompt.startswith(kept[:place].removesuffix("<|assistant|>"))


async def test_hosted_tools_and_items_are_left_out(http, engine, tokenizer):
    items = [
        USER,
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "fox"}},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
        {"type": "compaction_summary", "encrypted_content": "gAAAAAx"},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAAAx"},
    ]
    tools = [EXEC, HOSTED, {"type": "image_generation"}, {"type": "mcp", "server_label": "x"}, {"type": "tool_search"}]
    answer = await http.post("/v1/responses", json={"input": items, "tools": tools, "include": ["other"]})
    assert answer.status_code == 200, answer.text
    assert answer.headers[LEFT_OUT].split(", ") == [
        "tools[1] (web_search)",
        "tools[2] (image_generation)",
        "tools[3] (mcp)",
        "tools[4] (tool_search)",
        "include (other)",
        "input (web_search_call)",
        "input (ghost_snapshot)",
        "input (compaction_summary)",
        "input (image_generation_call)",
        "reasoning.encrypted_content (encrypted)",
    ]
    assert "gAAAAA" not in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("unknown_fields", ["refuse", "ignore"])
async def test_unknown_kinds_are_left_out_where_the_server_is_set_so(make_app, unknown_fields):
    body = {"input": [USER, {"type": "telepathy", "x": 1}], "tools": [EXEC, {"type": "crystal_ball", "y": 2}]}
    async with connect(make_app(unknown_fields=unknown_fields)) as http:
        answer = await http.post("/v1/responses", json=body)
    if unknown_fields == "refuse":
        assert answer.status_code == 400
    else:
        assert answer.headers[LEFT_OUT] == "tools[1] (crystal_ball), input (telepathy)"


async def test_tools_that_come_as_items(http, engine, tokenizer):
    """Newer models have no `tools`: the first item has them."""
    says(engine, tokenizer, written("functions__exec", {"input": "text(1)"}))
    tools = [
        {"type": "namespace", "name": "functions", "description": "", "tools": [{"type": "custom", "name": "exec"}]}
    ]
    more = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": tools}
    events = await events_of(http, [more, *OPENING], tools=None)
    (item,) = done_items(events)
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "functions", "exec")
    assert "functions__exec" in prompt_of(engine, tokenizer)


async def test_a_result_without_a_call_is_text_of_the_client(http, engine, tokenizer):
    result = {
        "type": "function_call_output",
        "id": "fco_1",
        "name": "goal",
        "namespace": "agent",
        "output": "Short.",
    }
    response = await http.post("/v1/responses", json={"input": [USER, result]})
    assert response.status_code == 200, response.text
    assert "agent__goal: Short." in prompt_of(engine, tokenizer)
    items = (await http.get(f"/v1/responses/{response.json()['id']}/input_items")).json()["data"]
    assert {item["type"] for item in items} == {"message"}


async def test_messages_between_agents(http, engine, tokenizer):
    """The client passes a message of our model on as if it was encrypted."""
    parts = [{"type": "input_text", "text": "Payload: "}, {"type": "encrypted_content", "encrypted_content": "Say hi."}]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/sub", "content": parts}
    await events_of(http, [*OPENING, item])
    assert "Message from /root to /root/sub:\nPayload: Say hi." in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("is_object", [False, True])
async def test_images_in_results_are_left_out(http, engine, tokenizer, is_object):
    parts = [{"type": "input_text", "text": "See: "}, {"type": "input_image", "image_url": "data:image/png;base64,x"}]
    items = [
        *OPENING,
        {"type": "function_call", "call_id": "c", "name": "exec_command", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": {"content": parts} if is_object else parts},
    ]
    answer = await http.post("/v1/responses", json={"input": items, "tools": [EXEC]})
    assert answer.headers[LEFT_OUT] == "messages (image)"
    assert "See: [image left out" in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("changes", [{}, {"instructions": "Short."}, {"generate": False}])
async def test_an_empty_input_warms_the_cache(http, engine, tokenizer, changes):
    answer = await http.post("/v1/responses", json={"input": [], "max_output_tokens": 1, **changes})
    assert answer.status_code == 200, answer.text
    assert engine.submissions[-1].sampling.max_tokens == 1
    assert prompt_of(engine, tokenizer).count("<|user|>") == 1
    assert ("Short." in prompt_of(engine, tokenizer)) == ("instructions" in changes)


@pytest.mark.parametrize("damaged", ["moeflow:ü", "moeflow:=", "moeflow:/w==", "gAAAAAx"])
def test_sealed_texts_of_others_are_left_out(damaged):
    request = LeftOut()
    with noting(request):
        assert unsealed(damaged, "input") == ""
    assert request.notes == ["input (encrypted)"]


async def test_reasoning_that_is_sent_back_as_encrypted_content():
    app, engine, tokenizer = thinking_model()
    text = "<think>\nHm. Ü!\n</think>\n\nA fox."
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    async with connect(app) as http:
        events = await events_of(http, [USER], tools=[])
        reasoning, message = done_items(events)
        assert reasoning["encrypted_content"] == sealed("Hm. Ü!")
        assert reasoning["content"][0]["text"] == "Hm. Ü!"
        check_events(events)
        prompts = []
        for kept in (
            {"summary": [], "content": reasoning["content"]},
            {"summary": [], "content": None, "encrypted_content": reasoning["encrypted_content"]},
        ):
            await events_of(http, [USER, {"type": "reasoning", "id": "rs_1", **kept}, message, USER], tools=[])
            prompts.append(engine.submissions[-1].prompt_token_ids)
        assert prompts[0] == prompts[1]
        plain = (await http.post("/v1/responses", json={"input": [USER]})).json()
    assert plain["output"][0]["encrypted_content"] is None


@pytest.mark.parametrize(
    ("choice", "tools", "left_out", "is_constrained"),
    [
        (
            {"type": "web_search_preview"},
            [EXEC, HOSTED],
            "tools[1] (web_search), tool_choice (web_search_preview)",
            False,
        ),
        ({"type": "custom", "name": "apply_patch"}, [APPLY_PATCH], None, True),
        ({"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}, [AGENTS], None, True),
        ({"type": "function", "name": "close_agent"}, [AGENTS], None, True),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "local_shell"}]},
            [EXEC, {"type": "local_shell"}],
            None,
            True,
        ),
        ("required", [HOSTED], "tools[0] (web_search), tool_choice", False),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "exec_command"}, {"type": "mcp", "server_label": "x"}],
            },
            [EXEC, TOOL_SEARCH],
            "tool_choice (mcp)",
            True,
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "image_generation"}]},
            [EXEC],
            "tool_choice (image_generation)",
            False,
        ),
    ],
)
async def test_choices(http, engine, choice, tools, left_out, is_constrained):
    answer = await http.post("/v1/responses", json={"input": "Hi", "tools": tools, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(LEFT_OUT) == left_out
    assert bool(engine.submissions[-1].sampling.grammar) == is_constrained


@pytest.mark.parametrize(
    ("form", "left_out", "is_held"),
    [
        (APPLY_PATCH["format"], None, True),
        ({"type": "grammar", "syntax": "regex", "definition": "^[a-z]+$"}, None, True),
        (
            {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'},
            "tools[0].format (grammar not enforced)",
            False,
        ),
        ({"type": "text"}, None, False),
        (None, None, False),
    ],
)
async def test_inputs_follow_the_grammars_of_tools(http, engine, tokenizer, form, left_out, is_held):
    tools = [{"type": "custom", "name": "edit", "format": form}]
    answer = await http.post("/v1/responses", json={"input": "Hi", "tools": tools})
    assert answer.headers.get(LEFT_OUT) == left_out
    grammar = engine.submissions[-1].sampling.grammar
    assert bool(grammar) == is_held
    assert ('"pattern": "^(?:' in grammar) == is_held
    prompt = prompt_of(engine, tokenizer)
    assert "^(?:" not in prompt
    definition = json.dumps((form or {}).get("definition", ""))[1:-1]
    assert definition in prompt


async def test_a_conversation_that_is_too_long(http, engine, tokenizer):
    """A stream has the code that makes Codex summarize; a whole answer is an error."""
    body = {"input": "x" * 100_000, "stream": True}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    kinds = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    last = json.loads(answer.text.splitlines()[-2].removeprefix("data: "))
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "context_length_exceeded"
    assert "tokens" in last["response"]["error"]["message"]
    whole = await http.post("/v1/responses", json={**body, "stream": False})
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_models_as_codex_lists_them(http):
    listed = (await http.get("/v1/models")).json()
    (card,), (model,) = listed["data"], listed["models"]
    assert (model["slug"], model["context_window"]) == (card["id"], card["max_model_len"])
    assert model["base_instructions"]
    assert model["truncation_policy"] == {"mode": "bytes", "limit": 10_000}


async def test_names_in_namespaces(http, engine, tokenizer):
    assert flat_name(None, "go") == "go"
    assert flat_name("mcp__files__", "read") == "mcp__files__read"
    long = {flat_name("n" * 100, "t" * 100 + str(number)) for number in range(20)}
    assert len(long) == 20
    assert all(len(name) == 128 for name in long)
    tools = [{**AGENTS, "name": "a"}, {**EXEC, "name": "a__note"}]
    answer = await http.post("/v1/responses", json={"input": "Hi", "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_a_plain_request_is_not_changed(http):
    answer = await http.post("/v1/responses", json={"input": "Hi", "tools": [EXEC]})
    assert LEFT_OUT not in answer.headers
    assert answer.json()["output"][0]["content"][0]["text"] == REPLY


JSON_VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=2))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.text(max_size=30).map(lambda text: (json.dumps({"input": text}), text)),
        st.text(max_size=30).map(lambda text: (json.dumps({"input": text}, ensure_ascii=False), text)),
        st.text(max_size=9).map(lambda text: (json.dumps({"patch": text}), text)),
        st.text(max_size=9).map(lambda text: (json.dumps(text), text)),
        st.text("ab *\n", min_size=1, max_size=9).map(lambda text: (f"*{text}", f"*{text}")),
        JSON_VALUES.map(lambda value: (json.dumps({"a": value, "b": 1}), None)),
    ),
    st.lists(st.integers(1, 5), min_size=60, max_size=60),
)
def test_inputs_in_any_pieces(written_and_meant, sizes):
    """Whatever the model makes of the arguments, the pieces are the whole, and JSON is read as the standard has it."""
    arguments, meant = written_and_meant
    call = written_call(Called("custom_tool_call", "x"))
    pieces, place = [], 0
    for size in sizes:
        pieces.append(call.push(arguments[place : place + size]))
        place += size
    pieces.append(call.push(arguments[place:]))
    rest, whole = call.finish()
    assert "".join(pieces) + rest == whole
    if meant is not None:
        assert whole == meant
    whole.encode()
