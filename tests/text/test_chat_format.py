"""How models converse, seen from small templates with the marks of known ones, and the fallback for others."""

from __future__ import annotations

import pytest

from moeflow.text.chat_format import ChatFormat
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning
from moeflow.text.tool_syntax.tool import Tool
from tests.engine.fakes import CHAT_TEMPLATE, byte_level_core, byte_level_tokenizer, wrap

TOOLS = [Tool("look", "Looks it up.", {"type": "object", "properties": {"q": {"type": "string"}}})]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"q": "fox"}'}}
CONVERSATION = [
    {"role": "user", "content": "Which?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "red", "tool_call_id": "1"},
    {"role": "tool", "content": "brown", "tool_call_id": "1"},
]
SIGNS = {  # what real templates hold, as far as it matters
    "hermes": "{% if tools %}return a json object within <tool_call></tool_call> XML tags:{% endif %}",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=example>\n<parameter=p>\n{% endif %}",
    "glm4": "{% for tool in tools %}<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>{% endfor %}",
    "llama3": '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}.{% endif %}',
    "mistral_list": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' }}",
    "mistral": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "deepseek": "{% if 'system' %}{% endif %}{% if m['tool_calls'] %}<｜tool▁call▁begin｜><｜tool▁sep｜>{% endif %}",  # noqa: RUF001
    "deepseek_v3": "{% if m['tool_calls'] %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json{% endif %}",  # noqa: RUF001
    "harmony": "{% if tools %}# Tools{% endif %}<|start|>assistant<|channel|>analysis<|message|>",
    "gemma4": '{% for tool in tools %}<|tool_call>call:<|"|>{% endfor %}',
    "functiongemma": "{% if tools %}<start_function_call>call:f{a:<escape>x<escape>}{% endif %}",
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_template_shows_its_syntax(name):
    assert ChatFormat(SIGNS[name]).syntax.name == name


def test_a_template_without_tools_gets_them_as_text():
    prompt = byte_level_tokenizer().chat_prompt(CONVERSATION, TOOLS)
    text = byte_level_tokenizer().decode(prompt.token_ids, skip_special_tokens=False)
    turns = text.split("<|turn|>")[1:]
    assert [turn.split(":")[0] for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert '{"name": "look", "description": "Looks it up.", "parameters": {"type": "object"' in turns[0]
    assert '<tool_call>\n{"name": "look", "arguments": {"q": "fox"}}\n</tool_call>' in turns[2]
    assert turns[3].endswith("<tool_response>\nred\n</tool_response>\n<tool_response>\nbrown\n</tool_response>\n")


def test_a_system_message_stays_before_the_tools():
    conversation, tools = ChatFormat(CHAT_TEMPLATE).conversation(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}], [TOOLS[0].as_json()]
    )
    assert tools == ()
    assert conversation[0]["content"].startswith("Be brief.\n\n# Tools\n")
    assert len(conversation) == 2


def test_a_template_without_system_messages_has_the_tools_in_the_first_one():
    question = {"role": "user", "content": "x"}
    conversation, _ = ChatFormat("{{ raise_exception('only user and assistant') }}").conversation(
        [question, {"role": "assistant", "content": "y"}], [TOOLS[0].as_json()]
    )
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    assert conversation[0]["content"].startswith("# Tools\n")
    assert conversation[0]["content"].endswith("\n\nx")


def test_a_template_that_writes_calls_but_tells_of_no_tools_is_told_how_it_calls():
    chat_format = ChatFormat(SIGNS["deepseek"])
    conversation, tools = chat_format.conversation(CONVERSATION, [TOOLS[0].as_json()])
    assert tools == ()
    assert "<｜tool▁call▁begin｜><name><｜tool▁sep｜>{" in conversation[0]["content"]  # noqa: RUF001
    assert conversation[1:] == CONVERSATION  # these it knows itself


def test_a_template_that_knows_tools_gets_arguments_as_objects():
    source = "{{ tools[0].function.name }} {% for m in messages %}{% for c in m.tool_calls or [] %}"
    source += "{{ c.function.arguments.q }} "
    tokenizer = wrap(byte_level_core(), chat_template=source + "{% endfor %}{% endfor %}<tool_call></tool_call>")
    text = tokenizer.decode(tokenizer.chat_prompt(CONVERSATION, TOOLS).token_ids)
    assert text == "look fox fox <tool_call></tool_call>"


def test_arguments_that_nest_too_deeply_stay_a_text():
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | length }} "
    tokenizer = wrap(byte_level_core(), chat_template=source + "{% endfor %}{% endfor %}<tool_call></tool_call>")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "[" * 5000}}
    prompt = tokenizer.chat_prompt([{"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)
    assert tokenizer.decode(prompt.token_ids) == "5000 <tool_call></tool_call>"


def read(chat_format, text, tools=(), *, is_reasoning=False):
    reader = chat_format.reader(tools, is_reasoning=is_reasoning)
    events = [event for char in text for event in reader.push(char)] + reader.finish()
    found = []
    for event in events:
        if found and type(found[-1]) is type(event):
            found[-1] = type(event)(found[-1].text + event.text)
        else:
            found.append(event)
    return found


THINKS = ChatFormat("{{ content.split('</think>') }}{% if tools %}<tool_call></tool_call>{% endif %}")


def test_reasoning_stands_apart():
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert read(THINKS, "<think>\nHm, <b>\n</think>\n\nYes") == [Reasoning("Hm, <b>"), Content("Yes")]
    assert read(THINKS, "Hm</think>Yes", is_reasoning=True) == [Reasoning("Hm"), Content("Yes")]
    assert read(THINKS, f"<think>Hm</think>\n{call}", TOOLS) == [Reasoning("Hm"), CallBegun("look"), Arguments("{}")]
    assert read(THINKS, " \n<thin") == [Content(" \n<thin")]
    assert read(THINKS, "Yes <think>no</think>") == [Content("Yes <think>no</think>")]
    assert read(THINKS, "<think>Hm") == [Reasoning("Hm")]
    assert read(THINKS, "<think>\n\n</think>\n\nYes") == [Content("Yes")]


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("</think>", "<|assistant|><think>\n", True),
        ("</think>", "<|assistant|><think>\n\n</think>\n\n", False),
        ("</think>", "<|assistant|>", False),
        ("[/THINK]", "[/INST][THINK]", True),
        ("<|channel>thought", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("", "<think>", False),
    ],
)
def test_a_prompt_may_begin_the_reasoning(template, prompt, expected):
    assert ChatFormat(template).ends_in_reasoning(prompt) is expected


def test_arguments_have_the_types_of_their_schema():
    text = '<tool_call>{"name": "look", "arguments": {"q": 12345}}</tool_call>'
    assert read(THINKS, text, TOOLS) == [CallBegun("look"), Arguments('{"q": "12345"}')]


def test_without_tools_and_reasoning_there_is_nothing_to_read():
    assert ChatFormat(CHAT_TEMPLATE).reader((), is_reasoning=False) is None
    assert ChatFormat(SIGNS["hermes"]).markers(()) == ()
    assert ChatFormat(SIGNS["harmony"]).reader((), is_reasoning=False) is not None
