"""Waiting requests of batch jobs, in the order of algorithm 2's micro-batches.

Knows nothing of passes; the scheduler takes from its beginning when there is a place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice

from moeflow.core.request import Request
from moeflow.scheduler.offline_batching import form_micro_batches

USUAL_ANSWER = 256  # tokens that an answer is expected to have until a longer one is seen


class BatchQueue:
    """A queue that sorts itself, a batch of requests at a time."""

    def __init__(self, max_num_seqs: int, cache_size: int) -> None:
        """Take the size of a micro-batch and the capacity for K and V, in tokens."""
        self._max_num_seqs = max_num_seqs
        self._cache_size = cache_size
        self._arrived: list[Request] = []
        self._formed: deque[Request] = deque()
        self._longest_answer = USUAL_ANSWER

    def __len__(self) -> int:
        return len(self._arrived) + len(self._formed)

    def __iter__(self) -> Iterator[Request]:
        yield from self._formed
        yield from self._arrived

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._arrived.append(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that had begun before all others."""
        self._formed.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        (self._formed if request in self._formed else self._arrived).remove(request)

    def first(self, passed_by: Collection[Request]) -> Request | None:
        """Return the next request that is not passed by; None: there is none."""
        num_seen = 0
        while True:
            for request in islice(self._formed, num_seen, None):
                if request not in passed_by:
                    return request
            if not self._arrived:
                return None
            num_seen = len(self._formed)
            self._form()

    def expected_tokens(self, request: Request) -> int:
        """Return how many tokens a request will probably have in the end."""
        answer = min(request.max_tokens, max(self._longest_answer, len(request.output_token_ids)))
        return len(request.prompt_token_ids) + answer

    def note_answer(self, request: Request) -> None:
        """Learn from how long an answer has become."""
        self._longest_answer = max(self._longest_answer, len(request.output_token_ids))

    def _form(self) -> None:
        """Form micro-batches of all arrived requests. Requests that do not fit wait for the next time."""
        micro_batches, self._arrived = form_micro_batches(
            self._arrived,
            lambda request: len(request.prompt_token_ids),
            num_micro_batches=-(-len(self._arrived) // self._max_num_seqs),
            max_requests=self._max_num_seqs,
            gen_len=max(min(request.max_tokens, self._longest_answer) for request in self._arrived),
            cache_size=self._cache_size,
        )
        self._formed.extend(request for micro_batch in micro_batches for request in micro_batch)
        if not micro_batches:  # none fits beside a longest answer: one at a time does, the engine has seen to that
            self._formed.append(self._arrived.pop(0))
