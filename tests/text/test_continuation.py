"""Answers that a client has begun: prompts that end with them, against transformers, and events of the rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from moeflow.core.sampling_params import SamplingParams
from moeflow.llm import LLM
from moeflow.text.chat_format import ChatFormat
from moeflow.text.jinja_template import JinjaTemplate
from moeflow.text.tokenizer import Tokenizer
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning
from tests.engine.fakes import byte_level_core, wrap
from tests.text.test_chat_format import SIGNS, TOOLS
from tests.text.test_jinja_template import LLAMA3, VARIABLES
from tests.tiny_mixtral import CHAT_TEMPLATE, write_tiny_mixtral

USER = {"role": "user", "content": "Which fox?"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
# As Qwen3's: the last answer gets a block of reasoning, be it empty, and its own text loses line breaks before it.
THINKING = """{%- for message in messages %}
{%- set content = message.content %}{%- set reasoning = message.reasoning_content or '' %}
{%- if '</think>' in content %}
    {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and (loop.last or reasoning) %}
    {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' ~ call.function.name ~ '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{%- if add_generation_prompt and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
HARMONY = """{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""
# As Mistral's: a space stands before each answer, which the model writes itself where it is asked for one.
SPACED = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- ' ' + message.content | trim + '</s>' }}
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}"""
TEMPLATES = {"plain": CHAT_TEMPLATE, "strips": LLAMA3, "spaced": SPACED, "thinking": THINKING, "harmony": HARMONY}
BEFORE = {
    "a question": [USER],
    "turns": [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Red."}, USER],
    "a call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "red"}],
}
BEGUN = {
    "text": {"content": "The brown"},
    "said before": {"content": "Red."},
    "lines": {"content": "One,\n\ntwo"},
    "with reasoning": {"content": "The brown", "reasoning_content": "Foxes are red.\nOr brown."},
    "reasoning in the text": {"content": "<think>\nHm.\n</think>\n\nThe brown"},
}


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_ends_with_the_text_as_transformers_renders_it(name, before, begun):
    messages = [*BEFORE[before], {"role": "assistant", **BEGUN[begun]}]
    theirs = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATES[name], continue_final_message=True, **VARIABLES
    )[0][0]
    prompt = JinjaTemplate(TEMPLATES[name], VARIABLES).render(messages, continues_last=True)
    assert prompt == theirs
    assert prompt.endswith(BEGUN[begun]["content"])


@pytest.mark.parametrize("content", [" ", "\n\nOne", "  One  ", " One"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_whitespace_before_the_text_is_the_models(name, content):
    """The oracle: the prompt that the model had before it wrote the text."""
    template, variables = JinjaTemplate(TEMPLATES[name], VARIABLES), {"enable_thinking": False}
    asked = template.render([USER], variables=variables)
    head = "<|channel|>final<|message|>" if name == "harmony" else ""  # which is no text
    begun = template.render([USER, {"role": "assistant", "content": content}], (), variables, continues_last=True)
    assert begun == asked + head + content


@pytest.mark.parametrize("name", TEMPLATES)
def test_whitespace_behind_the_text_stays(name):
    begun = {"role": "assistant", "content": "One,"}
    theirs = render_jinja_template(
        conversations=[[USER, begun]], chat_template=TEMPLATES[name], continue_final_message=True, **VARIABLES
    )[0][0]
    begun["content"] += "\n\n"
    assert JinjaTemplate(TEMPLATES[name], VARIABLES).render([USER, begun], continues_last=True) == theirs + "\n\n"


def test_an_empty_text_stands_where_a_text_would():
    template, empty = JinjaTemplate(THINKING, {}), {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    prompt = template.render([USER, empty], continues_last=True)
    assert prompt.endswith("<|im_start|>assistant\n<think>\nHm.\n</think>\n\n")
    theirs = render_jinja_template(
        conversations=[[USER, {**empty, "content": "One"}]], chat_template=THINKING, continue_final_message=True
    )[0][0]
    assert prompt + "One" == theirs


@pytest.mark.parametrize(
    "source", ["{{ messages | length }}", "{{ messages[-1].content | lower }}", "{{ messages[-1].content[:4] }}"]
)
def test_a_template_that_does_not_show_the_text_is_refused(source):
    with pytest.raises(Exception, match="does not show the end of the last message"):
        JinjaTemplate(source, {}).render([USER, {"role": "assistant", "content": "One, two"}], continues_last=True)


MARKED = {  # texts with a call, as the syntaxes write it, and the call's name
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]look[ARGS]{"q": "x"}',
    "harmony": '<|end|><|start|>assistant<|channel|>commentary to=functions.look <|message|>{"q": "x"}<|call|>',
    "llama3": '<|python_tag|>{"name": "look", "parameters": {"q": "x"}}',
}
PIECES = st.lists(
    st.sampled_from(["The ", "fox", "\n", " ", "<", "{", '{"name": ', "}", "[", "<tool", "|>"]), max_size=8
)


@pytest.mark.parametrize("name", MARKED)
@given(begun=PIECES.map("".join), rest=PIECES.map("".join), is_called=st.booleans(), cuts=st.sets(st.integers(0, 60)))
def test_events_have_the_new_text_and_calls_however_it_is_cut(name, begun, rest, is_called, cuts):
    """The oracle: the begun text and the new text are the text before the call."""
    reader = ChatFormat(SIGNS[name]).reader(TOOLS, begun=begun)
    answer = rest + (MARKED[name] if is_called else "")
    at = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    events = [event for start, end in pairwise(at) for event in reader.push(answer[start:end])]
    events += reader.finish()
    text = "".join(event.text for event in events if isinstance(event, Content))
    assert text.strip() == rest.strip() if is_called else text == rest
    assert [event.name for event in events if isinstance(event, CallBegun)] == ["look"] * is_called
    assert "".join(event.text for event in events if isinstance(event, Arguments)) == '{"q": "x"}' * is_called


def test_a_text_is_behind_the_reasoning_and_one_that_begins_to_reason_is_not():
    behind = ChatFormat(THINKING).reader([], begun="The brown")
    assert behind.push(" fox") + behind.finish() == [Content(" fox")]
    within = ChatFormat(THINKING).reader([], begun="<think>\nFoxes")
    events = within.push(" are red.\n</think>\n\nThe brown") + within.finish()
    assert events == [Reasoning(" are red."), Content("The brown")]


def test_a_text_that_ends_with_a_marker_has_not_begun_to_reason():
    tokenizer = wrap(byte_level_core(), chat_template=THINKING)
    messages = [USER, {"role": "assistant", "content": "Models write <think>"}]
    assert not tokenizer.chat_prompt(messages, continues_last=True).is_reasoning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continued")
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, num_threads=1, kv_cache_bytes=2**22) as llm:
        yield llm


@pytest.mark.parametrize("name", ["plain", "strips", "thinking"])
def test_the_rest_has_the_tokens_of_the_uninterrupted_answer(folder, llm, name, tmp_path):
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    # Printable characters and line breaks, so that any token is a whole text.
    shown = {tokenizer.encode(char)[0] for char in map(chr, [10, 32, *range(97, 123)])}
    hidden = {token: -100.0 for token in range(258) if token not in shown}

    def generate(prompt, num_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logit_bias=hidden)
        (output,) = llm.generate([prompt], params, progress=False)
        return list(output.outputs[0].token_ids)

    answer = generate(tokenizer.chat_prompt([USER], variables={"enable_thinking": False}).token_ids, 24)
    assert len(set(answer)) > 2
    for num_begun in (1, 7, 12, 23):
        begun = tokenizer.decode(answer[:num_begun])
        messages = [USER, {"role": "assistant", "content": begun}]
        prompt = tokenizer.chat_prompt(messages, (), {"enable_thinking": False}, continues_last=True)
        assert not prompt.is_reasoning
        assert generate(prompt.token_ids, 24 - num_begun) == answer[num_begun:]
        if begun == begun.strip():
            expected = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
            assert prompt.token_ids == expected
