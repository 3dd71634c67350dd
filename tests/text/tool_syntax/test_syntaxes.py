"""Each syntax reads what its models' chat templates write, however the text is cut, and takes all else as content."""

from __future__ import annotations

import json

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.text.answer_reader import AnswerReader
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning
from moeflow.text.tool_syntax.syntax import SYNTAXES
from moeflow.text.tool_syntax.tool import Tool, Tools

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "options": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
        "unit": {"enum": ["c", "f"]},
    },
}
TOOLS = Tools((Tool("look", None, SCHEMA), Tool("go-to.it")))
BY_NAME = {syntax.name: syntax for syntax in SYNTAXES}


def hermes(calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )


def qwen3_coder(calls):
    def plain(value):
        return value if isinstance(value, str) else json.dumps(value)

    def one(name, given):
        parameters = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm4(calls):
    def plain(value):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def one(name, given):
        pairs = "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>" for key, value in given.items()
        )
        return f"<tool_call>{name}{pairs}\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def llama3(calls):
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def llama3_tagged(calls):
    return "<|python_tag|>" + llama3(calls)


def mistral_list(calls):
    written = [{"name": name, "arguments": given, "id": "123456789"} for name, given in calls]
    return f"[TOOL_CALLS] {json.dumps(written)}"


def mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def mistral_with_ids(calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]123456789[ARGS]{json.dumps(given)}" for name, given in calls)


def deepseek_v3(calls):
    begin, end = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"  # noqa: RUF001
    written = "\n".join(f"{begin}{name}\n```json\n{json.dumps(given)}{end}" for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"  # noqa: RUF001


def deepseek_v31(calls):
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"  # noqa: RUF001
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"  # noqa: RUF001


def gemma(calls, begin, end, quote):
    def plain(value):
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{plain(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(plain, value)) + "]"
        return json.dumps(value)

    return "".join(f"{begin}call:{name}{plain(given)}{end}" for name, given in calls)


def gemma4(calls):
    return gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>')


def functiongemma(calls):
    return gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>")


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
        for name, given in calls
    )


def harmony_recipient_first(calls):
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(given)}<|call|>" for name, given in calls
    )


WRITERS = [
    ("hermes", hermes),
    ("qwen3_coder", qwen3_coder),
    ("glm4", glm4),
    ("llama3", llama3),
    ("llama3", llama3_tagged),
    ("mistral_list", mistral_list),
    ("mistral", mistral_named),
    ("mistral", mistral_with_ids),
    ("deepseek_v3", deepseek_v3),
    ("deepseek", deepseek_v31),
    ("gemma4", gemma4),
    ("functiongemma", functiongemma),
    ("harmony", harmony),
    ("harmony", harmony_recipient_first),
]
CALLS = [
    (
        "look",
        {"text": 'a "quoted"\nline \\ and 🦊', "count": -3, "options": {"k": [1, 2.5, None, {"x": True}], "e": {}}},
    ),
    ("go-to.it", {}),
    ("look", {"maybe": "yes", "unit": "c", "count": 0}),
]


def read(syntax, text, cuts=()):
    """Return the events of a text that comes in pieces, texts of the same kind joined."""
    reader = AnswerReader(lambda reader: syntax.read(reader, TOOLS))
    events, last = [], 0
    for cut in [*sorted(cuts), len(text)]:
        events += reader.push(text[last:cut])
        last = cut
    joined = []
    for event in events + reader.finish():
        if joined and type(joined[-1]) is type(event) and not isinstance(event, CallBegun):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def calls_of(events):
    found = []
    for event in events:
        if isinstance(event, CallBegun):
            found.append([event.name, ""])
        elif isinstance(event, Arguments):
            found[-1][1] += event.text
    return [(name, json.loads(text)) for name, text in found]


def content_of(events):
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls_are_read_as_they_are_written(name, write, count):
    text = write(CALLS[:count])
    for cuts in ((), range(1, len(text))):
        events = read(BY_NAME[name], text, cuts)
        assert calls_of(events) == CALLS[:count]
        assert content_of(events) == ""


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda one: getattr(one, "__name__", ""))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cuts_change_nothing(name, write, data):
    """Also with text before the calls, and with a truncated or damaged answer."""
    text = data.draw(st.sampled_from(["", "Well. ", "{", "\n<"])) + write(CALLS[:2]) + data.draw(st.text(max_size=5))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + data.draw(st.text('{}[]<>"\\,:|/ \nab', max_size=3)) + text[place + 1 :]
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(BY_NAME[name], text, cuts) == read(BY_NAME[name], text)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_is_read(syntax, data):
    """For any text of the model: never an error, and nothing is lost before the first call."""
    pieces = st.sampled_from(
        [*syntax.markers, '{"name": "look",', '"arguments": {', "}", "text", "\n", '"', "look", ":", ","]
    )
    text = "".join(data.draw(st.lists(pieces, max_size=14)))
    events = read(syntax, text)
    assert events == read(syntax, text, range(1, len(text)))
    if not any(isinstance(event, CallBegun | Reasoning) for event in events) and syntax.name not in (
        "harmony",
        "deepseek",
        "deepseek_v3",
    ):
        assert content_of(events).split() == text.split()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nI would call it\n</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}'),
        ("hermes", "<tool_call>" + "[" * 500),
        ("qwen3_coder", "<tool_call>\n<fun"),
        ("glm4", "<tool_call>not a name</tool_call>"),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", '{"temperature": 3}'),
        ("mistral", "[TOOL_CALLS] none of them"),
        ("gemma4", "<|tool_call>look<tool_call|>"),
        ("harmony", "just text, <without> any channel"),
    ],
)
def test_what_is_no_call_is_content(name, text):
    assert read(BY_NAME[name], text) == [Content(text)]


def test_arguments_come_as_they_are_written():
    """So that a client sees a long text grow."""
    for name, write in WRITERS:
        text = write([("look", {"text": "x" * 1000})])
        reader = AnswerReader(lambda reader, name=name: BY_NAME[name].read(reader, TOOLS))
        reader.push(text[: text.index("x" * 100) + 500])
        events = reader.push("x" * 100)
        assert "".join(event.text for event in events) == "x" * 100, write.__name__


def test_a_call_that_breaks_off_has_its_beginning():
    text = hermes(CALLS[:1])
    events = read(BY_NAME["hermes"], text[: text.index("quoted")])
    assert events == [CallBegun("look"), Arguments('{"text": "a \\"')]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "look"}', {"a": 1}),
        ('{"id": "1", "name": "look", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "look"}', {}),
        ('{"name": "look", "arguments": null}', {}),
        ('{"name": "look", "parameters": {"a": "line\nbreak"}}', {"a": "line\nbreak"}),
    ],
)
def test_json_as_models_write_it(text, arguments):
    assert calls_of(read(BY_NAME["hermes"], f"<tool_call>{text}</tool_call>")) == [("look", arguments)]


def test_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert read(BY_NAME["harmony"], text) == [Reasoning("Hm."), Content("I look.Done.")]


def test_text_stands_beside_calls():
    events = read(BY_NAME["hermes"], f"I look.\n{hermes(CALLS[:1])}\n")
    assert content_of(events) == "I look."
    assert calls_of(events) == CALLS[:1]


def test_plain_values_follow_the_schema():
    text = qwen3_coder(
        [("look", {"text": "12", "maybe": "12", "count": "3.0", "unit": "7", "new": "True", "o": "null"})]
    )
    ((_, arguments),) = calls_of(read(BY_NAME["qwen3_coder"], text))
    assert arguments == {"text": "12", "maybe": "12", "count": 3.0, "unit": "7", "new": True, "o": None}


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (r'{"a": "\ud83dx"}', {"a": "\ufffdx"}),
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        (r'{"a": "\ude00", "\ud83d": 1}', {"a": "\ufffd", "\ufffd": 1}),
        (r'{"a": "\ud83d\ud83d\ude00\""}', {"a": '\ufffd😀"'}),
        (r'{"a": "\\ud83d"}', {"a": r"\ud83d"}),
    ],
)
def test_escapes_of_half_a_character_are_none(written, says):
    text = f"[TOOL_CALLS]look[ARGS]{written}"
    for cuts in ((), range(1, len(text))):
        assert calls_of(read(BY_NAME["mistral"], text, cuts)) == [("look", says)]


PIECES = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ": ",
        '"',
        '"a"',
        "1",
        "-",
        ".5",
        "e9",
        "true",
        "nul",
        "l",
        "\\",
        "u",
        "d83d",
        "\\ude00",
        "x",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_arguments_are_the_beginning_of_json_at_any_time(text):
    """The judge is another parser that accepts truncated input, as clients do while a call is streamed."""
    text = '[TOOL_CALLS]look[ARGS]{"b": ' + text
    reader, so_far = AnswerReader(lambda reader: BY_NAME["mistral"].read(reader, TOOLS)), ""
    for char in text:
        for event in reader.push(char):
            if isinstance(event, Arguments):
                so_far += event.text
                pydantic_core.from_json(so_far, allow_partial=True)
