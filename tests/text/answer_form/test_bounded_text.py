"""A text of a bounded length ends where a reader sees its first end, and has as many characters as it must there."""

from __future__ import annotations

import itertools

import pytest
from llguidance import LLMatcher

from moeflow.engine.constraints.grammar_tokens import for_grammars
from moeflow.engine.constraints.vocabulary import Vocabulary
from moeflow.text.answer_form.lark import LarkWriter

END = "\n</x>\n"
PIECES = ("a", "é", "\n", " ", "</x", "</x>", END)


@pytest.mark.parametrize(("min_chars", "max_chars"), [(0, 5), (2, 5), (2, None), (3, 20), (0, 0)])
def test_texts(min_chars, max_chars):
    lark = LarkWriter((), lambda text: None)
    grammar = lark.grammar(lark.bounded_text_until(END, min_chars, max_chars))
    tokens = for_grammars(Vocabulary([bytes([byte]) for byte in range(256)] + [b""], [256], [256]))
    start = LLMatcher(tokens, grammar)
    assert not start.is_error(), start.get_error()
    seen = set()
    for pieces in itertools.chain.from_iterable(itertools.product(PIECES, repeat=count) for count in range(4)):
        written = "".join(pieces) + END
        text, _, behind = written.partition(END)
        is_right = not behind and min_chars <= len(text) <= (max_chars if max_chars is not None else len(text))
        matcher = start.deep_copy()
        utf8 = list(written.encode())
        is_taken = matcher.try_consume_tokens(utf8) == len(utf8) and matcher.is_accepting()
        assert is_taken <= is_right, written
        assert is_taken or not is_right or "</x>" in text, written
        seen.add(is_taken)
    assert seen == {True, False}
