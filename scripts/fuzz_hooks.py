"""Corrects bodies that schemathesis draws where the OpenAPI document cannot state a rule.

The rules: schemas, regular expressions and grammars can be enforced. An answer has one form. A named tool is one of the
offered tools, and names of tools differ. A message to continue is an assistant's text. Results belong to calls. Both
sides of a comparison have the same number of texts. The conversation has a text, and the context holds it.

Only values of the right type are changed: bodies that were drawn to be refused still are.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import schemathesis

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
MOST_CHARS = 2200  # of all parts of a prompt as JSON, for a context of 3072 tokens, which are bytes: tools, where there
# are any, are introduced in 400 more, and some parts are written longer than they came
PROMPT_PARTS = ("messages", "input", "system", "instructions", "tools", "prompt", "context")
GRAMMAR_FIELDS = ("response_format", "structured_outputs", "output_config", "tools", "tool_choice")  # and guided_*
TEXTS = {"regex": "[ab]{1,3}", "grammar": 'start: "a"', "json": '{"type": "boolean"}'}
OTHER_FORMS = {"grammar": TEXTS["grammar"], "json_schema": TEXTS["json"]}  # names of llama.cpp
_validators: dict[str, jsonschema_rs.Validator] = {}  # by path


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Repair a body from any phase."""
    if case.media_type == "multipart/form-data" and isinstance(case.body, dict):
        _show_fields(case)
    if case.media_type != "application/json" or not isinstance(case.body, dict):
        return
    body, path = copy.deepcopy(case.body), case.operation.path
    is_right = len(json.dumps(body)) > MOST_CHARS // 8 and _validator(case.operation).is_valid(body)
    _mend_forms(body)
    _mend_tools(body)
    if is_right:
        _shorten(body)
    _mend_results(body)
    if path.endswith("/score") and isinstance(body.get("text_1"), list) and len(body["text_1"]) > 1:
        body["text_1"] = body["text_1"][:1] if _is_text(body["text_1"][0]) else body["text_1"]
    if body.get("add_generation_prompt") is (body.get("continue_final_message") is True):
        del body["add_generation_prompt"]
    if path.startswith("/v1/messages") and isinstance(body.get("messages"), list) and body["messages"]:
        body["messages"].append({"role": "user", "content": "Go on."})
    if _continues(body, path) and _validator(case.operation).is_valid(case.body):
        _mend_end(body)
    if path.startswith("/v1/responses"):
        _mend_input(body)
    for place in (body, body.get("options")):
        if isinstance(place, dict) and isinstance(place.get("seed"), int | float) and _is_rounded(place["seed"]):
            del place["seed"]
    case.body = body


def _is_rounded(seed: float) -> bool:
    """Whether a number is no 64-bit integer, but the float nearest to it is the largest or smallest one's.

    By this the validators of JSON Schema take it for one.
    """
    return abs(seed) <= 2**63 + 1024 and not -(2**63) <= seed < 2**63


def _show_fields(case: Any) -> None:
    """Give fields of a form that the document does not know a text: lists and objects of nothing are not sent."""
    content = case.operation.schema.raw_schema["paths"][case.operation.path]["post"]["requestBody"]["content"]
    known = content[case.media_type]["schema"]["properties"]
    unsent = [name for name, value in case.body.items() if not isinstance(value, str | bytes | int | float)]
    if unknown := [name for name in unsent if name not in known]:
        case.body = case.body | dict.fromkeys(unknown, "x")


def _mend_forms(body: dict[str, Any]) -> None:
    for place, prefix in ((body, "guided_"), (body.get("structured_outputs"), "")):
        for name, text in TEXTS.items() if isinstance(place, dict) else ():
            if isinstance(place.get(prefix + name), str) and place[prefix + name]:
                place[prefix + name] = text
            elif isinstance(place.get(prefix + name), dict):
                place[prefix + name] = SCHEMA
    for name, text in OTHER_FORMS.items():
        if isinstance(body.get(name), str) and body[name]:
            body[name] = text
        elif isinstance(body.get(name), dict):
            body[name] = SCHEMA
    _keep_one(
        body,
        ("response_format", "structured_outputs", *(f"guided_{name}" for name in (*TEXTS, "choice")), *OTHER_FORMS),
    )
    if isinstance(wish := body.get("structured_outputs"), dict):
        _keep_one(wish, ("json_object", "choice", *TEXTS))
    if isinstance(body.get("format"), dict):  # of Ollama's API
        body["format"] = SCHEMA
    places = (("response_format", "json_schema"), ("text", "format"), ("output_config", "format"))
    for described in (body[name].get(within) for name, within in places if isinstance(body.get(name), dict)):
        if isinstance(described, dict) and isinstance(described.get("schema"), dict):
            described["schema"] = SCHEMA


def _keep_one(body: dict[str, Any], names: tuple[str, ...]) -> None:
    """Leave out, of fields that are given, those behind the first that are certainly right."""
    given = [name for name in names if body.get(name) is not None]
    for name in given[1:]:
        value = body[name]
        is_right = (isinstance(value, str) and bool(value)) or value == SCHEMA
        is_right |= isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)
        if is_right:
            del body[name]
    if "structured_outputs" in given[1:] and _is_format(body.get("response_format")):
        del body["response_format"]


def _is_format(value: Any) -> bool:
    """Whether a value is certainly right as `response_format`."""
    value = _without_nulls(value)
    if value in ({"type": "text"}, {"type": "json_object"}):
        return True
    if not isinstance(value, dict) or value.keys() != {"type", "json_schema"} or value["type"] != "json_schema":
        return False
    types = {"name": str, "description": str | None, "schema": dict | None, "strict": bool | None}
    described = _without_nulls(value["json_schema"])
    return (
        isinstance(described, dict)
        and "name" in described
        and all(name in types and isinstance(one, types[name]) for name, one in described.items())
    )


def _without_nulls(value: Any) -> Any:
    """Return an object without its fields that are null, which ask for nothing."""
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


def _mend_input(body: dict[str, Any]) -> None:
    """Let somebody speak where there is nothing but reasoning, which may be empty."""
    items = body.get("input")
    if isinstance(items, list) and items and all(_is_reasoning(item) for item in items):
        body["input"] = [*items, {"role": "user", "content": "Go on."}]


def _mend_results(body: dict[str, Any]) -> None:
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            body[name] = _without_lone_results(body[name])
            if body[name] and not any(_has_text(item) for item in body[name]):
                body[name].insert(0, {"role": "user", "content": "Begin."})


def _without_lone_results(items: list[Any]) -> list[Any]:
    """Turn results of calls that no earlier item makes into words of a user."""
    called: set[str] = set()
    kept: list[Any] = []
    for item in items:
        called |= _called_by(item)
        kept.append({"role": "user", "content": "Go on."} if _results_of(item) - called else item)
    return kept


def _has_text(message: Any) -> bool:
    """Return whether the model reads a text of a message, as far as it is easy to see."""
    content = message.get("content") if isinstance(message, dict) else None
    blocks = [one for one in _list(content) if isinstance(one, dict) and one.get("type") in ("text", "tool_result")]
    return content is None or isinstance(content, str) or bool(blocks)


def _called_by(item: Any) -> set[str]:
    """Return the ids of the calls in a message or an item."""
    if not isinstance(item, dict):
        return set()
    calls = [item, *_list(item.get("tool_calls")), *_list(item.get("content"))]
    kinds = {"function_call": "call_id", "custom_tool_call": "call_id", "function": "id", "tool_use": "id"}
    found = [call.get(kinds.get(str(call.get("type")), "")) for call in calls if isinstance(call, dict)]
    return {one for one in found if isinstance(one, str)}


def _results_of(item: Any) -> set[str]:
    """Return the ids of the calls that a message or an item has results of."""
    if not isinstance(item, dict):
        return set()
    results = [item, *_list(item.get("content"))]
    names = dict.fromkeys(("function_call_output", "custom_tool_call_output"), "call_id")
    names["tool_result"] = "tool_use_id"
    found = [one.get(names.get(str(one.get("type")), "")) for one in results if isinstance(one, dict)]
    if item.get("type") == "local_shell_call_output":
        found.append(item.get("call_id") or item.get("id") or "")
    found += [item.get("tool_call_id")] if item.get("role") == "tool" else []
    return {one for one in found if isinstance(one, str)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_reasoning(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _validator(operation: Any) -> jsonschema_rs.Validator:
    """Return what says whether the document allows a body; not so of one that was drawn to be refused."""
    path, method = operation.path, operation.method.lower()
    if path not in _validators:
        place = f"#/paths/{path.replace('/', '~1')}/{method}/requestBody/content/application~1json/schema"
        _validators[path] = jsonschema_rs.Draft202012Validator({**operation.schema.raw_schema, "$ref": place})
    return _validators[path]


def _shorten(body: dict[str, Any]) -> None:
    """Cut the end of an overlong prompt; its lists may be equally long."""
    parts = {name: body[name] for name in PROMPT_PARTS if body.get(name) is not None}
    lists = {name: part for name, part in parts.items() if isinstance(part, list)}
    room = MOST_CHARS - sum(len(json.dumps(parts[name])) for name in parts.keys() - lists)
    for name, part in lists.items():
        body[name] = _cut(part, room // len(lists))


def _cut(part: list[Any], most_chars: int) -> list[Any]:
    """Return the beginning of a list; of its only item, which is too long still, the content is cut likewise."""
    while len(part) > 1 and len(json.dumps(part)) > most_chars:
        part = part[: len(part) // 2]
    only = part[0] if len(part) == 1 else None
    if isinstance(only, dict) and isinstance(only.get("content"), list):
        return [{**only, "content": _cut(only["content"], most_chars)}]
    return part


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _continues(body: dict[str, Any], path: str) -> bool:
    """Whether a conversation asks for the rest of its last message."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    is_begun = isinstance(last, dict) and last.get("role") == "assistant" and path.startswith("/v1/messages")
    return is_begun or body.get("continue_final_message") is True


def _mend_end(body: dict[str, Any]) -> None:
    """Let a conversation end with the beginning of an answer, which nothing holds to a grammar."""
    body["messages"] += [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]
    for name in [name for name in body if name in GRAMMAR_FIELDS or name.startswith("guided_")]:
        del body[name]


def _is_repeated(tool: Any, earlier: list[Any]) -> bool:
    """Return whether a tool without a name of its own is offered again."""
    kind = _unnamed_kind(tool)
    return kind is not None and any(_unnamed_kind(other) == kind for other in earlier)


def _unnamed_kind(tool: Any) -> str | None:
    """Return the kind of a tool, or of a choice, that has no name of its own."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if kind in ("local_shell", "tool_search") else None


def _mend_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools")
    if isinstance(tools, list):  # a drawn request may have the same tool twice
        tools = body["tools"] = [
            copy.deepcopy(tool) for number, tool in enumerate(tools) if not _is_repeated(tool, tools[:number])
        ]
    given = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    functions = [tool.get("function", tool) for tool in given]  # responses have it plainly
    functions = [one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
    for number, function in enumerate(functions):
        for name in ("parameters", "input_schema"):
            if isinstance(function.get(name), dict):
                function[name] = SCHEMA
        for one in (function, *_list(function.get("tools"))):  # a namespace has tools of its own
            form = one.get("format") if isinstance(one, dict) else None
            if isinstance(form, dict) and isinstance(form.get("definition"), str):
                form["definition"] = TEXTS["regex" if form.get("syntax") == "regex" else "grammar"]
        if function["name"] in [other["name"] for other in functions[:number]]:
            function["name"] = f"f{number}"
    if (kind := _unnamed_kind(body.get("tool_choice"))) and all(_unnamed_kind(tool) != kind for tool in given):
        del body["tool_choice"]
    choice = body.get("tool_choice")
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    named = [
        choice,
        *(allowed["tools"] if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list) else []),
    ]
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        named += choice["tools"]
    for one in named:
        function = one.get("function", one) if isinstance(one, dict) else None
        if functions and isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]:
            function["name"] = functions[0]["name"]
