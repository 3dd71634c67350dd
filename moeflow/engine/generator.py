"""Text in, text out, over any engine: what servers and shells use. For asyncio.

Turns prompts into tokens and tokens into text, expands n completions and merges their streams, watches for
stop strings. Knows nothing of HTTP, nor of where the engine lives.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.admission import check_request, encode_prompt, make_submissions
from moeflow.engine.client import EngineClient
from moeflow.engine.merging import merge
from moeflow.engine.messages import Submission
from moeflow.engine.text import SequenceText, TextDelta
from moeflow.engine.tokenizer import Tokenizer


class Generator:
    """Generates text with an engine and the model's tokenizer."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self.client = client
        self.tokenizer = tokenizer

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a plain prompt, given as text or as token ids.

        Raises: RequestError if it is empty or malformed.
        """
        return encode_prompt(self.tokenizer, prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt that asks for the next message of a conversation.

        Raises: RequestError if the model has no chat template or the messages are malformed.
        """
        return self.tokenizer.apply_chat_template(messages)

    def stream(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, *, is_background: bool = False
    ) -> AsyncGenerator[TextDelta, None]:
        """Start a request when first iterated, and yield what its n completions bring, in order of arrival.

        The last delta of each completion has a `finish_reason`. Closing the iterator, or cancelling the task
        that reads it, cancels what still runs in the engine. What is in the background takes what others leave.

        Raises: RequestError at once, if the request can never run; EngineError while iterating, if the
        engine is gone.
        """
        check_request(self.client.model, prompt_token_ids, sampling)
        submissions = make_submissions(request_id, prompt_token_ids, sampling, is_background=is_background)
        children = [self._complete(index, submission) for index, submission in enumerate(submissions)]
        return children[0] if len(children) == 1 else _without_numbers(merge(children))

    async def _complete(self, index: int, submission: Submission) -> AsyncGenerator[TextDelta, None]:
        """Yield the deltas of one completion; leaving early closes the engine's stream, which cancels it."""
        text = SequenceText(index, self.tokenizer, submission.sampling)
        async with aclosing(self.client.stream(submission)) as outputs:
            async for output in outputs:
                delta = text.push(output)
                yield delta
                if delta.finish_reason is not None:
                    return


async def _without_numbers(
    numbered: AsyncGenerator[tuple[int, TextDelta], None],
) -> AsyncGenerator[TextDelta, None]:
    """Drop the stream numbers: a delta has its own."""
    async with aclosing(numbered) as deltas:
        async for _, delta in deltas:
            yield delta
