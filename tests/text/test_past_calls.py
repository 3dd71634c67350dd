"""Earlier calls whose arguments are an object, nothing, or no object, in templates like those of known models."""

from __future__ import annotations

import pytest

from moeflow.core.errors import RequestError
from moeflow.text.past_calls import with_objects
from moeflow.text.tokenizer import Tokenizer
from tests.engine.fakes import CHAT_TEMPLATE, byte_level_core, wrap

LOOP = "{% for m in messages %}{% if m.role == 'late' %}{{ raise_exception('a late role') }}{% endif %}"
LOOP += "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}{% if tools %}<tool_call></tool_call>{% endif %}"
ITEMS = "{% for k, v in c.function.arguments|items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}"
TEMPLATES = {
    "chatml": "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
    "mistral": "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}",
    "deepseek": "{{ '(' + c.function.arguments + ')' }}",
    "qwen3_coder": ITEMS,
    "glm": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
}
WRITTEN = {  # an object and a text
    "chatml": ('{"q": "fox"}', '{"q": "fo'),
    "mistral": ('[TOOL_CALLS]look[ARGS]{"q": "fox"}', r'[TOOL_CALLS]look[ARGS]"{\"q\": \"fo"'),
    "deepseek": ('({"q": "fox"})', '({"q": "fo)'),
    "qwen3_coder": ("<parameter=q>fox</parameter>", None),
    "glm": ("q=fox", None),
}
TEXTS = {
    '{"q": "fo': "no JSON: Unterminated string",
    "[1, 2]": "JSON of type array",
    "5": "JSON of type integer",
    '"{}"': "JSON of type string",
    "look it up": "no JSON: Expecting value",
    "[" * 5000: "no JSON: maximum recursion depth",
}


@pytest.fixture(scope="module")
def tokenizers():
    made = {name: wrap(byte_level_core(), chat_template=LOOP.replace("CALL", text)) for name, text in TEMPLATES.items()}
    yield made
    for tokenizer in made.values():
        tokenizer.close()


def call(arguments, **others):
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}, **others}


def render(tokenizer: Tokenizer, *calls, role="user"):
    messages = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "", "tool_calls": [*calls]},
        {"role": role, "content": "Go on."},
    ]
    return tokenizer.decode(tokenizer.chat_prompt(messages).token_ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_objects_and_texts(tokenizers, name):
    of_object, of_text = WRITTEN[name]
    assert render(tokenizers[name], call('{"q": "fox"}')) == render(tokenizers[name], call({"q": "fox"})) == of_object
    if of_text is not None:
        assert render(tokenizers[name], call('{"q": "fo')) == of_text
        assert render(tokenizers[name], call('{"q": "fox"}'), call('{"q": "fo')) == of_object + of_text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("nothing", ["", " \n", "null", "{}", None])
def test_nothing_is_an_empty_object(tokenizers, name, nothing):
    assert render(tokenizers[name], call(nothing)) == render(tokenizers[name], call({}))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:9])
def test_a_text_is_shown_or_refused_by_its_place(tokenizers, name, text):
    if WRITTEN[name][1] is not None:
        assert text[:40].replace('"', '\\"' if name == "mistral" else '"') in render(tokenizers[name], call(text))
        return
    with pytest.raises(RequestError) as caught:
        render(tokenizers[name], call("{}"), call(text), call(text))
    assert caught.value.param == "messages[1].tool_calls[1]"
    assert str(caught.value).startswith("messages[1].tool_calls[1]: the arguments of this call of 'look' are ")
    assert TEXTS[text] in str(caught.value)
    assert "Send an object" in str(caught.value)
    with pytest.raises(RequestError, match=r"^input\[7\]: ") as caught:
        render(tokenizers[name], call(text, place="input[7]"))
    assert caught.value.param == "input[7]"


def test_arguments_of_other_types_are_texts(tokenizers):
    """The HTTP API refuses them; a conversation from Python may hold them."""
    assert render(tokenizers["chatml"], call([1, "a"])) == '[1, "a"]'
    with pytest.raises(RequestError, match="JSON of type array"):
        render(tokenizers["qwen3_coder"], call([1]))


def test_another_cause_is_not_blamed_on_a_call(tokenizers):
    for name in TEMPLATES:
        with pytest.raises(RequestError, match="a late role") as caught:
            render(tokenizers[name], call("[1]"), role="late")
        assert caught.value.param == "messages"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"q": 123456789012345678901234567890}', "123456789012345678901234567890"),
        ('{"q": "a\nb"}', "b"),
        (r'{"q": "\ud83d"}', "\ufffd"),
        (r'{"q": "\ud83e\udd8a"}', "🦊"),
        (r'{"q": "\ud83e\udd8a", "deep": ' + "[" * 99 + "7" + "]" * 99 + "}", "🦊"),
        (r'{"q": NaN, "r": "\ud83e\udd8a"}', "🦊"),
    ],
)
def test_objects_of_any_content(tokenizers, name, arguments, shown):
    assert shown in render(tokenizers[name], call(arguments))


def test_halves_of_characters_are_replaced_in_keys_and_values():
    message = {"role": "assistant", "content": "", "tool_calls": [call(r'{"a\ud83e": ["\udd8a", "\ud83e\udd8a"]}')]}
    (found,) = with_objects(message)["tool_calls"]
    assert found["function"]["arguments"] == {"a\ufffd": ["\ufffd", "🦊"]}


def test_templates_do_not_see_places():
    with_place = wrap(byte_level_core(), chat_template=LOOP.replace("CALL", "{{ c | tojson }}"))
    assert "place" not in render(with_place, call("{}", place="input[7]"))
    with_place.close()


def test_a_template_without_calls_gets_them_as_text():
    tokenizer = wrap(byte_level_core(), chat_template=CHAT_TEMPLATE)
    assert r'{"name": "look", "arguments": "{\"q\": \"fo"}' in render(tokenizer, call('{"q": "fo'))
    assert '{"name": "look", "arguments": {}}' in render(tokenizer, call("", place="input[7]"))
    tokenizer.close()
