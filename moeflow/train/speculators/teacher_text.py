"""Text that the target says, with its likeliest tokens at each place: what a speculator learns from.

The engine generates it in large batches, round by round; a round's text depends on its number alone, so that work that
was interrupted goes on with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.messages import Submission, TokenOutput
from moeflow.kernels.interrupts import hold_interrupts

TOP_K: Final = 16  # likeliest tokens that are kept of a place
UNKNOWN: Final = -1  # token id where the target was not asked: in prompts
ROUND_SEQUENCES: Final = 64  # generated together
QUESTION_TOKENS: Final = 64  # of one that the model makes up


@dataclass(frozen=True, slots=True)
class TeacherText:
    """Sequences one after another.

    Shapes: token_ids [N] int64; lengths [S] int64; likeliest [N, K] int64, the target's likeliest tokens for this
    place, the likeliest first, UNKNOWN in prompts; logprobs [N, K] float32, of them.
    """

    token_ids: Tensor
    lengths: Tensor
    likeliest: Tensor
    logprobs: Tensor

    @property
    def num_said(self) -> int:
        """Tokens that the target said."""
        return int((self.likeliest[:, 0] != UNKNOWN).sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it by name, to be stored."""
        return {
            "token_ids": self.token_ids,
            "lengths": self.lengths,
            "likeliest": self.likeliest,
            "logprobs": self.logprobs,
        }

    def sequences(self) -> Iterator[slice]:
        """Yield where each sequence lies."""
        start = 0
        for length in self.lengths.tolist():
            yield slice(start, start + length)
            start += length


def joined(parts: Sequence[TeacherText]) -> TeacherText:
    """Return several texts as one; there is at least one."""
    columns = zip(*(part.tensors().values() for part in parts), strict=True)
    return TeacherText(*(torch.cat(column) for column in columns))


def say_round(
    engine: Engine,
    prompts: Iterator[list[int]],
    number: int,
    *,
    chat: tuple[list[int], list[int]] | None,
    max_tokens: int,
    temperature: float,
    on_tokens: Callable[[int], None],
) -> TeacherText:
    """Have the engine answer the prompts of a round, and return what it said.

    `chat` are the tokens before and behind what a user says: then half of the round are questions that the model makes
    up (Magpie, 2406.08464), so that it is not asked what nobody asks. The others are the next of `prompts`.
    on_tokens(num_tokens) is called after each pass. Raises: EngineError if a pass fails.
    """
    num_questions = 0 if chat is None else ROUND_SEQUENCES // 2
    asked = list(islice(prompts, ROUND_SEQUENCES - num_questions))
    if chat is not None:
        sampling = SamplingParams(max_tokens=QUESTION_TOKENS, temperature=1.0)
        begun = answers(engine, [chat[0]] * num_questions, sampling, 2 * number, on_tokens)
        asked += [[*chat[0], *_without_end(said(outputs), chat[1]), *chat[1]] for outputs in begun]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, logprobs=TOP_K)
    said_of_each = answers(engine, asked, sampling, 2 * number + 1, on_tokens)
    return joined([_sequence(prompt, outputs) for prompt, outputs in zip(asked, said_of_each, strict=True)])


def answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    number: int,
    on_tokens: Callable[[int], None],
) -> list[list[TokenOutput]]:
    """Return what follows each prompt. The number is one of a kind, and decides what is drawn.

    Raises: EngineError if a pass fails.
    """
    given = {f"round-{number}-{place}": prompt for place, prompt in enumerate(prompts)}
    found: dict[str, list[TokenOutput]] = {name: [] for name in given}
    try:
        with hold_interrupts():
            for place, (name, prompt) in enumerate(given.items()):
                engine.submit(Submission(name, prompt, sampling, seed=number * ROUND_SEQUENCES + place))
        while engine.has_work:
            with hold_interrupts():
                outputs = engine.step()
            for output in outputs:
                if output.error is not None:
                    raise EngineError(output.error)
                found[output.request_id].append(output)
            on_tokens(sum(len(output.token_ids) for output in outputs))
    finally:
        with hold_interrupts():
            engine.cancel(given)
    return list(found.values())


def said(outputs: Sequence[TokenOutput]) -> list[int]:
    """Return the tokens of an answer."""
    return [token_id for output in outputs for token_id in output.token_ids]


def _without_end(question: list[int], behind: Sequence[int]) -> list[int]:
    """Return a question without the token that ended it, with which what is behind begins."""
    return question[:-1] if question[-1:] == list(behind[:1]) else question


def _sequence(prompt: list[int], outputs: Sequence[TokenOutput]) -> TeacherText:
    own = said(outputs)
    tops = [place.top for output in outputs for place in output.logprobs or ()]
    unknown = torch.full((len(prompt), TOP_K), UNKNOWN)
    likeliest = torch.tensor([[token_id for token_id, _ in top] for top in tops], dtype=torch.int64).view(-1, TOP_K)
    logprobs = torch.tensor([[logprob for _, logprob in top] for top in tops], dtype=torch.float32).view(-1, TOP_K)
    return TeacherText(
        torch.tensor(prompt + own, dtype=torch.int64),
        torch.tensor([len(prompt) + len(own)]),
        torch.cat([unknown, likeliest]),
        torch.cat([torch.zeros(len(prompt), TOP_K), logprobs]),
    )
