"""Text in, text out, over any engine: what servers and shells use. For asyncio.

Turns prompts into tokens and tokens into text, expands n completions and merges their streams, watches for
stop strings. Knows nothing of HTTP, nor of where the engine lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Final

from moeflow.core.engine_messages import Submission
from moeflow.core.pooling_params import PoolingParams
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.admission import check_request, cut_prompt, encode_prompt, make_submissions
from moeflow.engine.client import EngineClient
from moeflow.engine.constraints.checker import GrammarChecker
from moeflow.engine.fair_turns import FairTurns
from moeflow.engine.merging import merge
from moeflow.text.answer_form.form import UserGrammar
from moeflow.text.output_text import SequenceText, TextDelta
from moeflow.text.text_lanes import TextLanes
from moeflow.text.tokenizer import ChatPrompt, Tokenizer
from moeflow.text.tool_syntax.tool import Tool

NUM_CHECKS: Final = 2  # grammars compiled at once, to see whether they can be
MAX_CHECKS_WAITING: Final = 32  # of one client
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class Generator:
    """Generates text with an engine and the model's tokenizer."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.lanes = TextLanes()
        self._checker = GrammarChecker(tokenizer, client.model.eos_token_ids)
        self._checks = ThreadPoolExecutor(1 + NUM_CHECKS, thread_name_prefix="grammar-checks")
        self._write_turns, self._check_turns = FairTurns(1), FairTurns(NUM_CHECKS, MAX_CHECKS_WAITING)

    async def encode(self, prompts: Sequence[str | Sequence[int]], *, is_cut: bool = False) -> list[list[int]]:
        """Return the tokens of plain prompts, each given as text or as token ids.

        `is_cut`: of prompts that the context cannot hold, as much as it can.

        Raises: RequestError if one is empty, malformed, or, unless it is cut, a text so long that the context cannot
        hold it.
        """
        max_tokens = self.client.model.max_model_len

        def work() -> list[list[int]]:
            if is_cut:
                encoded = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
                return [cut_prompt(self.tokenizer, token_ids, max_tokens - 1) for token_ids in encoded]
            return [encode_prompt(self.tokenizer, prompt, max_tokens=max_tokens) for prompt in prompts]

        return await self.lanes.run(sum(map(len, prompts)), work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        *,
        continues_last: bool = False,
    ) -> ChatPrompt:
        """Return the prompt that asks for the next message of a conversation. See `Tokenizer.chat_prompt`.

        Raises: RequestError if the model has no chat template, the messages are malformed, or their prompt is so long
        that the context cannot hold it; ChatTemplateError if the template is broken or exceeds its limits.
        """
        max_tokens = self.client.model.max_model_len

        def work() -> ChatPrompt:
            return self.tokenizer.chat_prompt(
                messages, tools, variables, max_tokens=max_tokens, continues_last=continues_last
            )

        return await self.lanes.run(num_chars(messages), work)

    async def checked(
        self, write: Callable[[], str], users: UserGrammar | None = None, *, client: str | None = None
    ) -> str:
        """Return the grammar that `write` makes, in a thread, as `SamplingParams` take it. See `GrammarChecker.check`.

        `client` waits for its own grammars alone. None: the server itself.

        Raises: what `write` raises; RequestError if the grammar is refused; QueueFullError if too many of the client
        wait.
        """
        loop = asyncio.get_running_loop()
        self._check_turns.require_room(client)
        async with self._write_turns.turn(client):
            lark = await loop.run_in_executor(self._checks, write)
        known = self._checker.known(lark, users)
        if known is not None:
            return known
        async with self._check_turns.turn(client, (lark, users)):
            return await loop.run_in_executor(self._checks, self._checker.check, lark, users)

    def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        is_batch: bool = False,
        pooling: PoolingParams | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> AsyncGenerator[TextDelta, None]:
        """Start a request when first iterated, and yield what its n completions bring, in order of arrival.

        Special tokens that are `shown` are text. With `pooling` it is one delta with the prompt's vector; `sampling` is
        `NO_TOKENS` then.

        The last delta of each completion has a `finish_reason`. Closing the iterator, or cancelling the task
        that reads it, cancels what still runs in the engine. Batch requests take what others leave.

        Raises: RequestError at once, if the request can never run; EngineError while iterating, if the
        engine is gone.
        """
        check_request(self.client.model, prompt_token_ids, sampling, pooling)
        submissions = make_submissions(
            request_id,
            prompt_token_ids,
            sampling,
            defaults=self.client.model.sampling_defaults,
            is_batch=is_batch,
            pooling=pooling,
        )
        children = [self._complete(index, submission, shown) for index, submission in enumerate(submissions)]
        return children[0] if len(children) == 1 else _without_numbers(merge(children))

    async def _complete(
        self, index: int, submission: Submission, shown: frozenset[int]
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield the deltas of one completion; leaving early closes the engine's stream, which cancels it."""
        text = SequenceText(index, self.tokenizer, submission.sampling, shown)
        async with aclosing(self.client.stream(submission)) as outputs:
            async for output in outputs:
                delta = text.push(output)
                yield delta
                if delta.finish_reason is not None:
                    return

    def close(self) -> None:
        """End threads and processes that work on text; the client is its owner's to end."""
        self.lanes.close()
        self._checks.shutdown(wait=False)
        self._checker.close()
        self.tokenizer.close()


async def _without_numbers(
    numbered: AsyncGenerator[tuple[int, TextDelta], None],
) -> AsyncGenerator[TextDelta, None]:
    """Drop the stream numbers: a delta has its own."""
    async with aclosing(numbered) as deltas:
        async for _, delta in deltas:
            yield delta


def num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how long a conversation is, about: the text of its messages, and a little for each."""
    return sum(len(message.get("content") or "") + 16 for message in messages)
