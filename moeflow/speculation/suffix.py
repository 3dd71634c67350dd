"""Drafts from earlier text: the tokens that followed the last few tokens before.

Earlier in the request itself, prompt and output, or in other requests' outputs. Needs no weights and next to no time,
and is right where text repeats: code, quotations, summaries, lists, the same question again. (Prompt lookup; Suffix
decoding, as in Arctic Inference, over an index of short runs of tokens instead of a suffix tree. The longest match is
searched among the most recent places only.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from moeflow.core.request import Request
from moeflow.speculation.speculator import Draft

RUN: Final = 2  # tokens that must be the same
MAX_MATCH: Final = 16  # tokens of a match that count: longer ones are as good
MAX_PLACES: Final = 8  # most recent ones that are looked at
MAX_DRAFTS: Final = 3
MAX_SHARED_TOKENS: Final = 1 << 17  # of ended requests' outputs that are kept
CHUNK: Final = 4096  # tokens of a long prompt that are indexed before a pass: a millisecond or two


class SuffixSpeculator:
    """Continues the last tokens as they went on before."""

    name = "suffix"

    def __init__(self) -> None:
        self._texts: dict[Request, _Text] = {}
        self._ended: deque[_Text] = deque()
        self._shared = _Index()
        self._num_shared = 0

    def propose(self, requests: Sequence[Request], max_depth: int) -> list[list[Draft]]:
        """See `Speculator`."""
        return [self._propose(request, max_depth) for request in requests]

    def believed(self, grade: int) -> float:
        """See `Speculator`: it cannot tell."""
        return 0.5

    def forget(self, request: Request) -> None:
        """Keep a text for other requests, within the limit."""
        self._texts.pop(request, None)
        output = list(request.output_token_ids)
        if len(output) <= RUN or len(output) > MAX_SHARED_TOKENS // 4:
            return
        text = _Text(output)
        text.index(self._shared, len(output))
        self._ended.append(text)
        self._num_shared += len(output)
        while self._num_shared > MAX_SHARED_TOKENS:
            oldest = self._ended.popleft()
            self._shared.drop(oldest)
            self._num_shared -= len(oldest.token_ids)

    def _propose(self, request: Request, max_depth: int) -> list[Draft]:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(list(request.prompt_token_ids))
        known = len(text.token_ids) - len(request.prompt_token_ids)
        text.token_ids += request.output_token_ids[known:]
        text.index(text.own, CHUNK)
        if len(text.token_ids) <= RUN:
            return []
        run = _run_at(text.token_ids, len(text.token_ids) - RUN)
        places = [*text.own.places(run), *self._shared.places(run)]
        matches = [(_match(text.token_ids, *place), place) for place in places if place[1] < len(place[0].token_ids)]
        matches.sort(key=lambda match: match[0], reverse=True)
        drafts: dict[tuple[int, ...], Draft] = {}
        for length, (source, stop) in matches:
            token_ids = tuple(source.token_ids[stop : stop + max_depth])
            if len(drafts) < MAX_DRAFTS and token_ids not in drafts:
                grade = min(length, MAX_MATCH)
                drafts[token_ids] = Draft(token_ids, tuple(_later(grade, place) for place in range(len(token_ids))))
        return list(drafts.values())


class _Text:
    """Some tokens; a first part is in an index."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.own = _Index()
        self._num_indexed = 0  # runs

    def index(self, index: _Index, max_tokens: int) -> None:
        """Add runs to the index, of so many tokens at most, but not the last one: nothing follows it yet."""
        stop = min(len(self.token_ids) - RUN, self._num_indexed + max_tokens)
        for start in range(self._num_indexed, stop):
            index.add(_run_at(self.token_ids, start), self, start + RUN)
        self._num_indexed = max(stop, self._num_indexed)


_Place = tuple[_Text, int]  # a text, and where in it a run of tokens ends


class _Index:
    """Where runs of tokens are, the most recent places of each."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], deque[_Place]] = defaultdict(lambda: deque(maxlen=MAX_PLACES))

    def add(self, run: tuple[int, ...], text: _Text, stop: int) -> None:
        """Note that a run ends before `stop`."""
        self._places[run].append((text, stop))

    def places(self, run: tuple[int, ...]) -> list[_Place]:
        """Return where a run was, the last place first."""
        found = self._places.get(run)
        return [] if found is None else list(reversed(found))

    def drop(self, text: _Text) -> None:
        """Forget the places in a text."""
        for start in range(len(text.token_ids) - RUN):
            run = _run_at(text.token_ids, start)
            places = self._places.get(run)
            if places is None:
                continue
            kept = [place for place in places if place[0] is not text]
            if kept:
                self._places[run] = deque(kept, maxlen=MAX_PLACES)
            else:
                del self._places[run]


def _run_at(token_ids: Sequence[int], start: int) -> tuple[int, ...]:
    return tuple(token_ids[start : start + RUN])


def _match(token_ids: Sequence[int], source: _Text, stop: int) -> int:
    """Return how many of the last tokens are the same as those before `stop` in a source: at least `RUN`."""
    length = RUN
    most = min(MAX_MATCH, stop, len(token_ids))
    while length < most and source.token_ids[stop - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


def _later(grade: int, place: int) -> int:
    """Return the grade of a token so far into a draft: as sure as if the tokens before it had matched, too."""
    return min(grade + place, MAX_MATCH)
