"""Which tokens say a text: all of them and no others, however tokens and texts are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moeflow.server.api.conversation.text_tokens import TextTokens
from moeflow.text.output_text import TokenText
from moeflow.text.tool_syntax.events import Arguments, CallBegun, Content, Reasoning


def tokens_of(utf8: bytes, cuts: list[int]) -> list[TokenText]:
    """Cut bytes into tokens, each with its own number."""
    places = sorted({0, len(utf8), *(cut % (len(utf8) + 1) for cut in cuts)})
    pieces = [utf8[first:last] for first, last in pairwise(places)]
    return [TokenText(number, "", piece, -1.0, 1, ()) for number, piece in enumerate(pieces)]


PARTS = st.lists(st.tuples(st.sampled_from("rct"), st.text("aüb ", min_size=1, max_size=6)), max_size=6)


@given(PARTS, st.lists(st.integers(0, 100)), st.booleans())
def test_each_token_of_a_text_is_found_where_markers_stand_apart(parts, cuts, at_once):
    """Between the parts there is what no part has, in a token of its own."""
    split = TextTokens()
    found: list[tuple[str, list[TokenText]]] = []
    waiting: list[TokenText] = []
    for kind, text in parts:
        marker = [TokenText(0, "", b"|", -1.0, 1, ())]
        own = tokens_of(text.encode(), cuts)
        events = {"r": [Reasoning(text)], "t": [Content(text)], "c": [CallBegun("f"), Arguments(text)]}[kind]
        batches = [[*marker, *own]] if at_once else [[one] for one in (*marker, *own)]
        for batch in batches[:-1]:
            assert not list(split.split(batch, []))
        new = list(split.split(batches[-1], events))
        found += [(text, tokens) for event, tokens in new if isinstance(event, Content)]
        waiting += own if kind == "t" else []
        assert all(not tokens for event, tokens in new if not isinstance(event, Content))
    assert [token for _, tokens in found for token in tokens] == waiting


def test_a_text_in_pieces_shares_no_token():
    split = TextTokens()
    first, second = tokens_of(b"ab", [1])
    assert list(split.split([first, second], [Content("a")])) == [(Content("a"), [first])]
    assert list(split.split([], [Content("b")])) == [(Content("b"), [second])]


def test_what_has_come_behind_a_call_may_be_text():
    split = TextTokens()
    first, second, third = tokens_of(b"ab<t", [1, 3])
    call = CallBegun("f")
    assert list(split.split([first, second], [call], "<")) == [(call, [])]
    assert list(split.split([third], [Content("<t")])) == [(Content("<t"), [second, third])]


def test_what_is_not_found_is_all_there_is():
    split = TextTokens()
    tokens = tokens_of(b"a<x>b", [1, 4])
    assert list(split.split(tokens, [Content("ab")])) == [(Content("ab"), tokens)]
