"""An engine that says a fixed text, byte by byte, and obeys commands: pause, fail, die.

Thread-safe enough to be steered from a test while a server in another thread uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from moeflow.core.embedding_bytes import encode_embedding
from moeflow.core.engine_messages import (
    DraftedTree,
    EngineStats,
    PromptProgress,
    Submission,
    TokenLogprobs,
    TokenOutput,
)
from moeflow.core.errors import EngineError
from moeflow.core.observation import Question, Sight
from moeflow.core.request import FinishReason
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.text.tokenizer import Tokenizer
from tests.shapes import INFO
from tests.tiny_mixtral import EOS

NAME = "fake-model"
REPLY = "Grüße, world 🦊!"  # characters of 1, 2 and 4 bytes, so of as many tokens


class FakeClient:
    def __init__(self, tokenizer: Tokenizer, *, max_num_seqs: int = 4, max_model_len: int = 256) -> None:
        self.reply = [*tokenizer.encode(REPLY, add_special_tokens=False), EOS]
        self.model = msgspec.structs.replace(
            INFO,
            name=NAME,
            path="/secret/place",
            vocab_size=tokenizer.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            eos_token_ids=(EOS,),
            num_layers=2,
        )
        self.submissions: list[Submission] = []
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self.pause_after: int | None = None  # tokens of each sequence; None: never pause
        self.fail_after: int | None = None  # tokens, then FinishReason.ERROR
        self.cancel_all = False  # end every sequence with FinishReason.CANCELLED
        self.state = EngineState.READY
        self.back_in_s = 0.0
        self.num_cached_tokens = 0
        self.drafts_per_pass = 0  # right ones; beside each there is a wrong one
        self.snapshot = EngineStats()
        self.questions: list[Question] = []
        self.sights: dict[int, Sight] = {}  # the answer to all questions
        self.replica_statuses: list[ReplicaStatus] = []  # empty: it is the only one

    def stats(self) -> EngineStats:
        return self.snapshot

    def replicas(self) -> list[ReplicaStatus]:
        return self.replica_statuses or [ReplicaStatus(self.state, self.snapshot)]

    async def look(self, question: Question) -> dict[int, Sight]:
        self.questions.append(question)
        return self.sights

    def die(self) -> None:
        self.state = EngineState.GONE

    async def shutdown(self, deadline_s: float) -> None:
        self.die()

    async def stream(self, submission: Submission) -> AsyncIterator[TokenOutput]:
        self._check_alive()
        self.submissions.append(submission)
        self.live.add(submission.request_id)
        finished = False
        try:
            for progress in self._progress(submission):
                yield progress
            position = 0
            while not finished:
                while self.pause_after is not None and position >= self.pause_after and not self.cancel_all:
                    self._check_alive()
                    await asyncio.sleep(0.002)
                self._check_alive()
                await asyncio.sleep(0)
                output = self._pass(submission, position)
                finished = output.finish_reason is not None
                position += len(output.token_ids) or 1
                yield output
        finally:
            self.live.discard(submission.request_id)
            if not finished:
                self.cancelled.append(submission.request_id)

    def _progress(self, submission: Submission) -> list[TokenOutput]:
        """How far the prompt is, as a model reports it that computes 4 tokens a pass, in 2.5 s."""
        if not submission.sampling.prompt_progress:
            return []
        total, cached = len(submission.prompt_token_ids), self.num_cached_tokens
        computed = [*range(cached + 4, total, 4), total]
        return [
            TokenOutput(
                request_id=submission.request_id,
                num_cached_tokens=cached,
                queued_s=0.25,
                prompt_progress=PromptProgress(total, cached, so_far, 2.5 * number),
            )
            for number, so_far in enumerate(computed, start=1)
        ]

    def _check_alive(self) -> None:
        if self.state is EngineState.GONE:
            raise EngineError("the engine process died (exit code -9)")

    def _pass(self, submission: Submission, position: int) -> TokenOutput:
        """Several outputs as one; all tokens but the last were drafted."""
        outputs = [self._output(submission, position)]
        while len(outputs) <= self.drafts_per_pass and outputs[-1].finish_reason is None:
            outputs.append(self._output(submission, position + len(outputs)))
        if not self.drafts_per_pass:
            return outputs[0]
        token_ids = [token for output in outputs for token in output.token_ids]
        right = token_ids[:-1]
        tree = DraftedTree(
            token_ids=[token for one in right for token in (one, EOS + 1)],
            parents=[parent for at in range(len(right)) for parent in [2 * at - 2 if at else -1] * 2],
            speculators=[["suffix"], ["draft", "suffix"]] * len(right),
            chances=[0.75, 0.125] * len(right),
            accepted=list(range(0, 2 * len(right), 2)),
        )
        wants_tree = submission.sampling.token_trees and right
        return msgspec.structs.replace(
            outputs[0],
            token_ids=token_ids,
            logprobs=None
            if outputs[0].logprobs is None
            else [token for output in outputs for token in output.logprobs or ()],
            finish_reason=outputs[-1].finish_reason,
            num_drafted_tokens=len(tree.token_ids),
            drafted_tree=tree if wants_tree else None,
        )

    def _output(self, submission: Submission, position: int) -> TokenOutput:
        request_id, sampling = submission.request_id, submission.sampling
        if self.cancel_all:
            return TokenOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED)
        if position == self.fail_after:
            return TokenOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error="out of memory")
        if submission.pooling is not None:
            vector = [float(len(submission.prompt_token_ids)), 0.5, -2.0, 0.25][: submission.pooling.dimensions]
            return TokenOutput(
                request_id=request_id,
                finish_reason=FinishReason.STOP,
                num_cached_tokens=self.num_cached_tokens,
                queued_s=0.25,
                embedding=encode_embedding(vector),
            )
        reply = self.reply[:-1] if sampling.ignore_eos else self.reply
        token_ids = [] if sampling.max_tokens == 0 else [reply[position % len(reply)]]
        reason = None
        if token_ids and (token_ids[0] == EOS or token_ids[0] in sampling.stop_token_ids):
            reason = FinishReason.STOP
        elif position + 1 >= (sampling.max_tokens if sampling.max_tokens is not None else 200):
            reason = FinishReason.LENGTH
        prompt = submission.prompt_token_ids
        wants_prompt = sampling.prompt_logprobs is not None and position == 0
        return TokenOutput(
            request_id=request_id,
            token_ids=token_ids,
            logprobs=None if sampling.logprobs is None else [_logprobs(t, sampling.logprobs) for t in token_ids],
            prompt_logprobs=[None, *(_logprobs(t, sampling.prompt_logprobs) for t in prompt[1:])]
            if wants_prompt
            else None,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            queued_s=0.25 if position == 0 else None,
        )


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token itself is the second likeliest; the likeliest is its neighbour."""
    neighbour = token_id - 1 if token_id > 2 else token_id + 1
    return TokenLogprobs(token_id, -1.5, 2, [(neighbour, -0.25), (token_id, -1.5), (0, float("-inf"))][:num_top])
