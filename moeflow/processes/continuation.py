"""One request as a supervisor keeps it: the submission and the received tokens, so that any engine can continue it.

An engine recomputes prompt and tokens, as after a preemption. Random numbers, penalties and limits count from the first
token, so the point of interruption does not matter. Knows no process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.request import FinishReason
from moeflow.processes.deaths import Death
from moeflow.processes.prefix_affinity import extend_hashes

CRASH = 1.0  # suspicion that a death adds to the requests of its pass
FROM_OUTSIDE = 0.25  # somebody ended it, perhaps for what a request did to the machine's memory
ISOLATED = 1.0  # from this suspicion on a request is computed alone
GUILTY = 2.0  # one that was alone in the pass


class Continuation:
    """A request and its tokens so far. Outputs go into `outputs`; None there: no engine will go on with it."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.outputs: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
        self.is_finished = False
        self._waits_since_s = time.monotonic()  # for its next tokens
        self._token_ids: list[int] = []
        self._prefixes: list[int] = []  # hashes of blocks
        self._num_cached_tokens: int | None = None  # as its first engine reported
        self._suspicion = 0.0  # of deaths in whose pass it was, with no token since
        self._died_at = -1  # output tokens that it had in the last of these

    @property
    def place(self) -> tuple[bool, bool, float]:
        """Its place among the requests of a new engine. Interactive requests come first, then started ones, which keep
        their places in the engine. Among these, the longest wait for a token comes first.
        """
        return self.submission.is_batch, not self._token_ids, self._waits_since_s

    @property
    def num_tokens(self) -> int:
        """The number of its tokens: of the prompt and the received ones."""
        return len(self.submission.prompt_token_ids) + len(self._token_ids)

    def prefixes(self, block_size: int) -> Sequence[int]:
        """Return the hashes of its whole blocks of tokens. Each is computed once."""
        if (len(self._prefixes) + 1) * block_size <= self.num_tokens:
            extend_hashes(self._prefixes, self.submission.prompt_token_ids + self._token_ids, block_size)
        return self._prefixes

    def rest(self) -> Submission:
        """Return what an engine that knows nothing of it is to be asked."""
        return msgspec.structs.replace(
            self.submission,
            generated_token_ids=list(self._token_ids),
            isolated_until=self._died_at + 1 if self._suspicion >= ISOLATED else 0,
        )

    def receive(self, output: TokenOutput) -> bool:
        """Take what an engine reports of it; return whether it has come any further."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        elif output.num_cached_tokens != self._num_cached_tokens:
            output = msgspec.structs.replace(output, num_cached_tokens=self._num_cached_tokens)
        if output.token_ids:
            self._waits_since_s = time.monotonic()
        self._token_ids += output.token_ids
        if len(self._token_ids) > self._died_at:
            self._suspicion = 0.0
        self.is_finished = output.finish_reason is not None
        self.outputs.put_nowait(output)
        return self.is_finished or bool(output.token_ids)

    def suspect(self, death: Death) -> None:
        """Note that an engine died; whether of this request is to be found out, if it was in the last pass.

        Unless it has come further since then, in another engine.
        """
        died_at = death.in_pass.get(self.submission.request_id)
        if died_at is not None and died_at >= len(self._token_ids):
            self._suspicion += FROM_OUTSIDE if death.is_from_outside else CRASH
            self._died_at = max(self._died_at, died_at)

    def fail(self, error: str) -> None:
        """End it with an error."""
        request_id, num_cached = self.submission.request_id, self._num_cached_tokens or 0
        self.receive(
            TokenOutput(
                request_id=request_id, finish_reason=FinishReason.ERROR, error=error, num_cached_tokens=num_cached
            )
        )

    def is_guilty(self, death: Death) -> bool:
        """Whether this death, which was reported to it, proves that engines die of this request and of no other."""
        return self._suspicion >= GUILTY and death.in_pass.keys() == {self.submission.request_id}


def judge(death: Death, requests: Mapping[str, Continuation]) -> Continuation | None:
    """Report a death to all requests; return the one that is proven to be its cause."""
    for request in requests.values():
        request.suspect(death)
    return next((request for request in requests.values() if request.is_guilty(death)), None)
