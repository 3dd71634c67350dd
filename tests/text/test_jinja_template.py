"""Templates like those of known models, rendered here and by transformers."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moeflow.text.jinja_template import JinjaTemplate
from tests.engine.fakes import CHAT_TEMPLATE

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
USER = {"role": "user", "content": "  What is the capital of <France> & 'Spain'?\n"}
ANSWER = {"role": "assistant", "content": "Paris"}
CONVERSATIONS = {
    "a question": [USER],
    "system and turns": [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER],
    "wrong order": [ANSWER, USER, USER],
    "null and name": [{**USER, "name": "Ada", "tool_calls": None}, {**ANSWER, "content": ""}, USER],
    "reasoning": [USER, {**ANSWER, "reasoning": "because"}, USER, {**ANSWER, "reasoning_content": "why"}, USER],
    "thinking": [USER, {**ANSWER, "thinking": None, "content": "<think>x</think>y"}, USER],
    "unknown role": [{"role": "wizard", "content": "x"}],
    "data": [{**USER, "data": {"b": [1, 2.5, None, True], "a": "ü"}}],
}
MIXTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y")[:0] ~ "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
QWEN3 = """{%- if tools %}tools{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in message.content %}
        {%- set reasoning = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}{{- '(' + reasoning + ')' }}
    {%- if loop.index0 > ns.last_query_index %}{{- ' after' }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined %}x{%- endif %}
{%- endif %}"""
TEMPLATES = {
    "test": CHAT_TEMPLATE,
    "mixtral": MIXTRAL,
    "llama 3": LLAMA3,
    "qwen 3": QWEN3,
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}:{{ m.content }}"
    "{% endgeneration %}{{ x is defined }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}"
    "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "gpt-oss": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.keys() | list }}{% endfor %}",
    "dicts": "{% set d = dict(a=1, b='x') %}{{ d.b }}{{ dict.fromkeys(['a', 'b'], 0) }}{{ dict([('k', 2)]) }}",
    "null": "{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ unk_token }}{{ nothing }}{{ nothing.x }}",
    "blocks": "a\n  {% if true %}\n  b\n  {% endif %}\n{# c #}\nd\n",
    "namespace of self": "{% set n = namespace(self=1, b=2) %}{{ n.self + n.b }}",
    "private name": "{% set n = namespace(_a=1) %}{{ n.b }}",
    "private attribute": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "changes a list": "{{ messages.append(1) }}",
    "escapes the sandbox": "{{ messages.__class__.__mro__ }}",
    "macro": "{% macro say(m) %}{{ m.role | upper }}: {{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}{{ m.content }}{% endcall %}{% endfor %}",
    "syntax error": "{% for m in messages %}",
    "unknown filter": "{{ messages | shout }}",
    "wide range": "{% for i in range(100001) %}{% endfor %}",
    "year": "{{ strftime_now('%Y') }}",
}


def outcome(render):
    try:
        return render()
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_it_renders_what_transformers_renders(name, conversation):
    messages = CONVERSATIONS[conversation]
    theirs = outcome(
        lambda: render_jinja_template(
            conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
            chat_template=TEMPLATES[name],
            add_generation_prompt=True,
            **VARIABLES,
        )[0][0]
    )
    assert outcome(lambda: JinjaTemplate(TEMPLATES[name], VARIABLES).render(messages)) == theirs


def test_the_templates_are_a_test():
    """Most render something, and some are refused."""
    outcomes = [
        outcome(lambda source=source: JinjaTemplate(source, VARIABLES).render(CONVERSATIONS["system and turns"]))
        for source in TEMPLATES.values()
    ]
    assert len(set(outcomes)) > 15
    assert {"TemplateSyntaxError", "SecurityError", "OverflowError"} <= set(outcomes)


TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "ü", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "go", "description": "", "parameters": {"a": [1, None, True]}}},
]
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"q": ["x", 1]}}}],
    },
    {"role": "tool", "content": "brown", "tool_call_id": "1", "name": "look"},
]
WITH_TOOLS = {
    "hermes": """{%- if tools %}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- message.role + message.content }}
    {%- for tool_call in message.tool_calls %}
        {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
        {{- '<tool_call>{"name": "' + tool_call.name + '", "arguments": ' }}
        {%- if tool_call.arguments is string %}{{ tool_call.arguments }}
        {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
        {{- '}</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}{{ reasoning_effort }}""",
    "mapping": "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v | tojson }}{% endfor %}{% endfor %}{{ m.tool_call_id }}{% endfor %}{{ bos_token }}",
    "indented": "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}{{ tools is none }}",
    "no tools": "{{ tools is not none and tools | length }}{{ messages | tojson }}",
}


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "reasoning_effort": "low", "bos_token": "b"}])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_tools_and_variables_are_rendered_as_transformers_does(name, variables, tools):
    theirs = render_jinja_template(
        conversations=[CALLED],
        tools=tools or None,
        chat_template=WITH_TOOLS[name],
        add_generation_prompt=True,
        **{**VARIABLES, **variables},
    )[0][0]
    assert JinjaTemplate(WITH_TOOLS[name], VARIABLES).render(CALLED, tools, variables) == theirs


def test_arguments_are_text_where_a_template_puts_text_together():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}"
    )
    source += "{% endfor %}"
    assert JinjaTemplate(source, {}).render(CALLED) == '({"q": ["x", 1]})'
    with pytest.raises(TypeError):
        JinjaTemplate("{{ 'a' + 1 }}", {}).render(CALLED)
