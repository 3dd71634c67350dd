"""Where the schema of a tool cannot be enforced and need not be, a call has any arguments."""

from __future__ import annotations

import asyncio

import pytest
from llguidance import LLMatcher

from moeflow.core.errors import RequestError
from moeflow.engine.constraints.grammar_tokens import tokens_of
from moeflow.server.api.conversation.conversation_grammar import grammar_of
from moeflow.server.api.conversation.tool_choice import ToolChoice
from moeflow.text.tool_syntax.tool import Tool
from tests.text.answer_form.test_answer_grammar import TEMPLATES, tokenizer_of

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "pattern": "^(?!/)"},
        "depth": {"type": ["integer", "any"], "not": {"const": 1}},
        "other": {"type": "any"},
    },
    "required": ["path"],
    "uniqueItems": True,
}
STRICT = Tool("go", None, {"type": "object", "properties": {}}, is_strict=True)
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "/a", "depth": "x"}}\n</tool_call>'


class Refusing:
    """Stands for a generator that refuses the first grammar."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_checked = 0

    async def checked(self, write, users, *, client) -> str:
        self.num_checked += 1
        if self.num_checked == 1:
            raise RequestError("it cannot be enforced")
        return write()


def grammar(generator, tools, **wish) -> str:
    asked = ToolChoice(tools, **wish)
    around = {"form_field": "response_format", "max_reasoning_tokens": None, "is_reasoning": False, "client": None}
    return asyncio.run(grammar_of(generator, asked, None, **around))


def test_a_tool_that_need_not_be_called_takes_any_object():
    tokenizer = tokenizer_of(TEMPLATES["hermes"], has_tokens=False)
    generator = Refusing(tokenizer)
    matcher = LLMatcher(tokens_of(tokenizer, [1]), grammar(generator, [Tool("look", None, SCHEMA), STRICT]))
    said = tokenizer.encode(CALL, add_special_tokens=False)
    assert matcher.try_consume_tokens(said) == len(said)
    assert generator.num_checked == 2


@pytest.mark.parametrize("wish", [{"is_required": True}, {"names": ["go"]}])
def test_what_must_hold_is_not_tried_again(wish):
    generator = Refusing(tokenizer_of(TEMPLATES["hermes"], has_tokens=False))
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        grammar(generator, [Tool("look", None, SCHEMA), STRICT], **wish)
    assert caught.value.param == "tools"
    assert generator.num_checked == 1
