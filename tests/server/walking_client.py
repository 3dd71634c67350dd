"""An engine without a model: it says a random walk through the grammar of a request, which ends things when it can."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

from llguidance import LLMatcher, LLTokenizer

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.engine.constraints.grammar_tokens import tokens_of
from moeflow.engine.constraints.limits import LIMITS
from moeflow.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.tiny_mixtral import EOS

ENDS = '"}],'  # characters that end things
MAX_TOKENS = 8_000  # of a walk


class WalkingClient(FakeClient):
    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        super().__init__(tokenizer, max_model_len=max_model_len)
        self._tokens = tokens_of(tokenizer, [EOS])
        self._ends = {tokenizer.encode(sign, add_special_tokens=False)[0] for sign in ENDS}
        self._random = random.Random(0)
        self._free_reply = self.reply

    async def stream(self, submission: Submission) -> AsyncIterator[TokenOutput]:
        grammar = submission.sampling.grammar
        self.reply = random_walk(self._tokens, grammar, self._ends, self._random) if grammar else self._free_reply
        async for output in super().stream(submission):
            yield output


def random_walk(tokens: LLTokenizer, grammar: str, ends: set[int], chooser: random.Random) -> list[int]:
    """Return the tokens of an answer within a grammar: half of them end things, where that is allowed."""
    matcher = LLMatcher(tokens, grammar, limits=LIMITS)
    said: list[int] = []
    while not matcher.is_stopped() and len(said) < MAX_TOKENS:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]
        ending = [token for token in allowed if token in ends or token == EOS]
        token = chooser.choice(ending if ending and chooser.random() < 0.5 else allowed)
        matcher.consume_token(token)
        said.append(token)
    assert not matcher.is_error(), matcher.get_error()
    return said if said[-1:] == [EOS] else [*said, EOS]
