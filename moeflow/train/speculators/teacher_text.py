"""The target's own text with its likeliest tokens at each place: the material a speculator learns from.

The engine generates it in large batches, round by round. A round depends on its number alone, so that resumed work has
the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.runner_loading import load_runner
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.planner.planning import plan_for_start
from moeflow.planner.usage import OFFLINE
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.phases import OnProgress, Phase
from moeflow.train.speculators.prompts import around_a_question, prompts
from moeflow.train.text_rounds import TextColumns

TOP_K: Final = 16  # likeliest tokens of a place
UNKNOWN: Final = -1  # token id in prompts, for which the target was not run
ROUND_SEQUENCES: Final = 64  # generated concurrently
QUESTION_TOKENS: Final = 64  # of a question from the model
_PROMPT_TOKENS: Final = 192
_MIN_CHAT: Final = 2 * QUESTION_TOKENS  # tokens of half a context; shorter ones are too short for questions


@dataclass(frozen=True, slots=True)
class TeacherText(TextColumns):
    """Prompts and answers.

    Shapes: likeliest [N, K] int64, the target's likeliest tokens for this place, the likeliest first, UNKNOWN in
    prompts; logprobs [N, K] float32.
    """

    likeliest: Tensor
    logprobs: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of answers."""
        return int((self.likeliest[:, 0] != UNKNOWN).sum())


@contextmanager
def running_target(settings: Settings, report: OnProgress) -> Iterator[tuple[Engine, ModelRunner]]:
    """Yield an engine over the target, and its runner. Raises: CheckpointError, ConfigError, CapacityError."""
    plan = plan_for_start(settings, OFFLINE)
    with closing(load_runner(plan.config, lambda done, total: report(Phase.LOADING, done, total))) as runner:
        yield Engine.over(plan.config, runner), runner


class Teacher:
    """Generates rounds of answers to prompts from `texts`.

    A chat model generates half of its questions itself (Magpie, 2406.08464), since these resemble real ones.
    """

    def __init__(
        self,
        engine: Engine,
        texts: Sequence[str],
        *,
        answer_tokens: int,
        temperature: float,
        seed: int,
        on_tokens: Callable[[int], None],
    ) -> None:
        """on_tokens(num_tokens) is called after each pass."""
        self._engine, self._texts, self._seed, self._on_tokens = engine, texts, seed, on_tokens
        self._answer_tokens, self._temperature = answer_tokens, temperature
        self._tokenizer = Tokenizer.load(engine.config.model_path)
        self._longest = half_context(engine)
        self._chat = around_a_question(self._tokenizer) if self._longest > _MIN_CHAT else None

    def round(self, number: int) -> TeacherText:
        """Return a round's text. Raises: EngineError if a pass fails."""
        chat, longest = self._chat, min(_PROMPT_TOKENS, self._longest)
        num_questions = 0 if chat is None else ROUND_SEQUENCES // 2
        pieces = prompts(self._texts, self._tokenizer, max_tokens=longest, seed=self._seed * 1_000_003 + number)
        asked = list(islice(pieces, ROUND_SEQUENCES - num_questions))
        if chat is not None:
            sampling = SamplingParams(max_tokens=QUESTION_TOKENS, temperature=1.0)
            begun = answers(self._engine, [chat[0]] * num_questions, sampling, 2 * number, self._on_tokens)
            asked += [[*chat[0], *_without_end(said(outputs), chat[1]), *chat[1]] for outputs in begun]
        sampling = SamplingParams(max_tokens=self._answer_tokens, temperature=self._temperature, logprobs=TOP_K)
        outputs = answers(self._engine, asked, sampling, 2 * number + 1, self._on_tokens)
        return TeacherText.joined(list(map(_sequence, asked, outputs)))


def half_context(engine: Engine) -> int:
    """Return the longest prompt, in tokens, with space for an answer of the same length."""
    return max(engine.config.scheduler.max_model_len // 2 - 1, 1)


def answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    number: int,
    on_tokens: Callable[[int], None],
) -> list[list[TokenOutput]]:
    """Return the answer to each prompt. The number seeds the sampling, so that each call has its own.

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
    """Return a question without the token that ended it, if `behind` begins with it."""
    return question[:-1] if question[-1:] == list(behind[:1]) else question


def _sequence(prompt: list[int], outputs: Sequence[TokenOutput]) -> TeacherText:
    own = said(outputs)
    tops = [place.top for output in outputs for place in output.logprobs or ()]
    likeliest = torch.tensor([[token_id for token_id, _ in top] for top in tops], dtype=torch.int64)
    logprobs = torch.tensor([[logprob for _, logprob in top] for top in tops], dtype=torch.float32)
    shape = (len(prompt), TOP_K)
    return TeacherText(
        torch.tensor(prompt + own, dtype=torch.int64),
        torch.tensor([len(prompt) + len(own)]),
        torch.cat([torch.full(shape, UNKNOWN), likeliest.view(-1, TOP_K)]),
        torch.cat([torch.zeros(shape), logprobs.view(-1, TOP_K)]),
    )
