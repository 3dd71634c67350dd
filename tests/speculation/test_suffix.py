"""Drafts from earlier text, against looking for the longest match by brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.speculation.suffix import MAX_MATCH, MAX_PLACES, RUN, SuffixSpeculator


def make_request(prompt, output=()):
    return Request("r", list(prompt), SamplingParams(), 100, output_token_ids=list(output))


def propose(speculator, request, max_depth=4):
    (drafts,) = speculator.propose([request], max_depth)
    return drafts


def longest_matches(text, max_depth):
    """By brute force: what followed the recent places with the longest match, and how long that was."""
    places = [stop for stop in range(RUN, len(text)) if text[stop - RUN : stop] == text[-RUN:] and stop < len(text)][
        -MAX_PLACES:
    ]
    lengths = {}
    for stop in places:
        length = RUN
        while length < min(MAX_MATCH, stop) and text[stop - 1 - length] == text[-1 - length]:
            length += 1
        follows = tuple(text[stop : stop + max_depth])
        lengths[follows] = max(lengths.get(follows, 0), length)
    return lengths


@given(prompt=st.lists(st.integers(0, 2), max_size=40), output=st.lists(st.integers(0, 2), max_size=20))
def test_drafts_are_what_followed_the_longest_matches(prompt, output):
    text = [*prompt, *output]
    drafts = propose(SuffixSpeculator(), make_request(prompt, output))
    expected = longest_matches(text, 4)
    assert {draft.token_ids for draft in drafts} <= set(expected)
    assert len(drafts) == min(len(expected), 3)
    found = [expected[draft.token_ids] for draft in drafts]
    assert found == sorted(expected.values(), reverse=True)[: len(drafts)]
    assert [draft.grades[0] for draft in drafts] == found


@given(prompt=st.lists(st.integers(0, 2), max_size=30), output=st.lists(st.integers(0, 2), max_size=20))
def test_text_that_grows_is_text_that_was_there(prompt, output):
    speculator, request = SuffixSpeculator(), make_request(prompt)
    for token in output:
        propose(speculator, request)
        request.output_token_ids.append(token)
    assert propose(speculator, request) == propose(SuffixSpeculator(), make_request(prompt, output))


def test_a_long_prompt_is_taken_in_by_and_by(monkeypatch):
    monkeypatch.setattr("moeflow.speculation.suffix.CHUNK", 10)
    speculator, request = SuffixSpeculator(), make_request([*range(50), 5, 6])
    found = [bool(propose(speculator, request)) for _ in range(6)]
    assert found[0] is True  # places 5, 6 are among the first
    late = make_request([*range(50), 45, 46])
    assert [bool(propose(speculator, late)) for _ in range(6)] == [False] * 4 + [True] * 2


def test_what_others_were_told_is_known_as_long_as_there_is_room(monkeypatch):
    speculator = SuffixSpeculator()
    ended = make_request([1], range(10, 30))
    speculator.forget(ended)
    assert [draft.token_ids for draft in propose(speculator, make_request([3, 12, 13]))] == [(14, 15, 16, 17)]
    monkeypatch.setattr("moeflow.speculation.suffix.MAX_SHARED_TOKENS", 100)
    for start in range(100, 1100, 100):
        speculator.forget(make_request([1], range(start, start + 20)))
    assert propose(speculator, make_request([3, 12, 13])) == []
    assert propose(speculator, make_request([3, 1005, 1006]))
    assert speculator._num_shared <= 100
    assert sum(map(len, speculator._shared._places.values())) <= 100
