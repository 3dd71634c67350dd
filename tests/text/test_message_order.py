"""Conversations that a chat template does not take as they stand, on templates of the usual kinds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from moeflow.core.errors import RequestError
from moeflow.text.jinja_template import JinjaTemplate
from moeflow.text.message_order import MessageOrder

SHOWN = "<{{ m.role }}>{{ m.content | trim }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
ANY = "{% for m in messages %}" + SHOWN + "{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + SHOWN + "{% endfor %}"
)
DROPS_LATER = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOWN + "{% endif %}{% endfor %}"
LAST_COUNTS = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}<system>{{ ns.system }}{% for m in messages if m.role != 'system' %}" + SHOWN + "{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% set ns = namespace(i=0) %}"
    "{% for m in rest %}{% if m.role not in ['user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}"
    "{% if loop.first %}<system>{{ first }}{% endif %}" + SHOWN + "{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}" + SHOWN + "{% endfor %}"
)
IGNORES_SYSTEM = "{% for m in messages if m.role != 'system' %}" + SHOWN + "{% endfor %}"
S, T, U, V, A, B, R = (
    {"role": "system", "content": "S"},
    {"role": "system", "content": "T"},
    {"role": "user", "content": "U"},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": "A"},
    {"role": "assistant", "content": "B", "tool_calls": [{"function": {"name": "go", "arguments": {}}}]},
    {"role": "tool", "content": "R", "tool_call_id": "1", "name": "go"},
)


class Rendering:
    """A template that counts how often it is asked."""

    def __init__(self, source: str) -> None:
        self.template = JinjaTemplate(source, {})
        self.num_calls = 0

    def __call__(self, messages) -> str:
        self.num_calls += 1
        try:
            return self.template.render(messages)
        except TemplateError as error:
            raise RequestError(str(error)) from None

    def arranged(self, messages) -> str:
        order = MessageOrder().arranged(messages, self, has_variables=False)
        return self(order)


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        (ANY, [S, U, T], "<system>S<user>U<system>T"),
        (ANY, [U, V], "<user>U<user>V"),
        (FIRST_ONLY, [S, U, T], "<system>S\n\nT<user>U"),
        (FIRST_ONLY, [U, T], "<system>T<user>U"),
        (FIRST_ONLY, [S, T, U, V], "<system>S\n\nT<user>U<user>V"),
        (FIRST_ONLY, [S, U, B, R, V], "<system>S<user>U<assistant>B[go]<tool>R<user>V"),
        (DROPS_LATER, [S, U, A, T, V], "<system>S<user>U<assistant>A<user>T<user>V"),
        (ALTERNATES, [U, S, A, T, V], "<system>S<user>U<assistant>A<user>T\n\nV"),
        (NO_SYSTEM, [S, U, A, T, V], "<user>S\n\nU<assistant>A<user>T\n\nV"),
        (ALTERNATES, [S, U, B, R, T], "<system>S<user>U<assistant>B[go]<tool>R\n\nT"),
        (LAST_COUNTS, [S, U, T], "<system>S\n\nT<user>U"),
        (LAST_COUNTS, [U, T], "<system>T<user>U"),
        (ALTERNATES, [S, U, T], "<system>S\n\nT<user>U"),
        (ALTERNATES, [S, U, T, V, A, U], "<system>S\n\nT<user>U\n\nV<assistant>A<user>U"),
        (ALTERNATES, [U, B, R, V], "<system><user>U<assistant>B[go]<tool>R\n\nV"),
        (ALTERNATES, [U, A, A, V], "<system><user>U<assistant>A\n\nA<user>V"),
        (NO_SYSTEM, [S, U, A, V], "<user>S\n\nU<assistant>A<user>V"),
        (NO_SYSTEM, [S, U, T, V], "<user>S\n\nT\n\nU\n\nV"),
        (NO_SYSTEM, [S], "<user>S"),
        (IGNORES_SYSTEM, [S, U], "<user>S\n\nU"),
    ],
)
def test_a_conversation_is_rearranged_as_far_as_the_template_needs(source, messages, prompt):
    assert Rendering(source).arranged(messages) == prompt


def test_all_fields_of_joined_messages_are_kept():
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    order = MessageOrder().arranged([U, thought, thought, B], Rendering(NO_SYSTEM), has_variables=False)
    assert order[1] == {**B, "reasoning_content": "hm\n\nhm"}


def test_ordinary_conversations_cost_no_rendering():
    render, order = Rendering(FIRST_ONLY), MessageOrder()
    messages = [U, B, R, A, V]
    assert order.arranged(messages, render, has_variables=False) is messages
    assert render.num_calls == 0
    for _ in range(3):
        assert order.arranged([S, *messages], render, has_variables=False) == [S, *messages]
    assert render.num_calls == 1


def test_variables_of_a_request_decide_for_it_alone():
    order, messages = MessageOrder(), [S, U]
    assert order.arranged(messages, Rendering(FIRST_ONLY), has_variables=False) == messages
    assert order.arranged(messages, Rendering(NO_SYSTEM), has_variables=True) == [{**U, "content": "S\n\nU"}]
    assert order.arranged(messages, Rendering(FIRST_ONLY), has_variables=False) == messages


def test_a_later_system_message_keeps_the_prompt_before_it():
    for source in (FIRST_ONLY, DROPS_LATER, LAST_COUNTS, ALTERNATES, NO_SYSTEM, IGNORES_SYSTEM):
        before = Rendering(source).arranged([S, U, A, V, A])
        assert Rendering(source).arranged([S, U, A, V, A, T, V]).startswith(before)


def test_a_refusal_for_another_reason_is_the_templates_own():
    render = Rendering("{{ raise_exception('no') }}")
    with pytest.raises(RequestError, match=r"^no$"):
        render.arranged([S, U, T])


@pytest.mark.parametrize("source", [ANY, FIRST_ONLY, DROPS_LATER, LAST_COUNTS, ALTERNATES, NO_SYSTEM, IGNORES_SYSTEM])
@given(st.lists(st.sampled_from("SSUUA"), min_size=1, max_size=9))
def test_every_text_of_any_conversation_arrives_in_order(source, letters):
    roles = {"S": "system", "U": "user", "A": "assistant"}
    messages = [{"role": roles[letter], "content": f"({letter}{n})"} for n, letter in enumerate(letters)]
    if "U" not in letters or letters[next(n for n, letter in enumerate(letters) if letter != "S")] == "A":
        return  # a template may refuse these in any arrangement
    prompt = Rendering(source).arranged(messages)
    for wanted in ("S", "UA"):
        places = [prompt.index(m["content"]) for m, letter in zip(messages, letters, strict=True) if letter in wanted]
        assert places == sorted(places)
