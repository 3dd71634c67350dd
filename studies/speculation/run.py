"""Latency with speculators and with incremental decoding, alternately, prompt by prompt.

All answer with engines over one loaded model; that the tokens are the same is checked. What counts is the time of a
token after the first: prompts take as long either way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.errors import EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.runner_loading import load_runner
from studies.speculation.arms import Arm, make_arms
from studies.speculation.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a prompt."""

    token_ids: list[int]
    seconds_per_token: float  # after the first
    passes: int  # after the first token's
    drafting_passes: int  # of these, with drafts
    drafted: int
    accepted: int


class SpeculationRun:
    """The engines, and their results for the prompts."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        new_tokens: int,
        temperature: float,
        sizes: Sequence[int] = (),
        pools: Sequence[int] = (),
    ) -> None:
        """Load the model; `sizes` are numbers of drafted tokens at which trees and chains are compared. `pools`: see
        `make_arms`.

        Raises: as `Engine.load`.
        """
        scheduler = replace(config.scheduler, prefix_caching=False)  # else an engine would find the others' blocks
        config = replace(config, scheduler=scheduler)
        self._runner = load_runner(config)
        self._arms = make_arms(config, self._runner, sizes, pools)
        self._sampling = SamplingParams(max_tokens=new_tokens, temperature=temperature)

    def __enter__(self) -> SpeculationRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    @property
    def names(self) -> list[str]:
        """What drafts in each of the arms, which all answer every prompt."""
        return [arm.name for arm in self._arms]

    def answer(self, prompts: Sequence[Prompt], rounds: int, on_step: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the fields of each arm but the one without drafts: all answer each prompt alternately, `rounds` times.

        Raises: EngineError if a pass fails, or if the tokens differ.
        """
        found: dict[str, list[tuple[Answer, ...]]] = {}  # by set of prompts
        for number in range(rounds):
            self.begin_round()
            for place, prompt in enumerate(prompts):
                found.setdefault(prompt.name, []).append(self.answers(prompt, number, number + place, on_step))
        return [self._fields(number, found) for number in range(1, len(self._arms))]

    def begin_round(self) -> None:
        """Have all forget their answers."""
        for arm in self._arms:
            arm.begin_round()

    def answers(
        self, prompt: Prompt, number: int, first: int, on_step: Callable[[], None] = lambda: None
    ) -> tuple[Answer, ...]:
        """Return all arms' answers to a prompt, that without drafts first; `first` selects the arm that begins.

        Raises: EngineError if a pass fails, or if the tokens differ.
        """
        answers: dict[int, Answer] = {}
        for step in range(len(self._arms)):
            which = (first + step) % len(self._arms)
            answers[which] = self._answer(self._arms[which], prompt, number)
            on_step()
        if any(answer.token_ids != answers[0].token_ids for answer in answers.values()):
            raise EngineError(f"speculation has changed the answer to a prompt of {prompt.name!r}: report it")
        return tuple(answers[which] for which in range(len(self._arms)))

    def _answer(self, arm: Arm, prompt: Prompt, number: int) -> Answer:
        engine = arm.engine
        arm.begin_answer()
        before = engine.stats()
        engine.submit(Submission("speculation", prompt.token_ids, self._sampling, seed=number))
        outputs: list[TokenOutput] = []
        passes, started_s = 0, 0.0
        while engine.has_work:
            outputs += engine.step()
            passes += 1
            if outputs and not started_s:
                passes, started_s = 0, time.perf_counter()
        seconds = time.perf_counter() - started_s
        if outputs[-1].error is not None:
            raise EngineError(outputs[-1].error)
        stats = engine.stats()
        token_ids = [token for output in outputs for token in output.token_ids]
        return Answer(
            token_ids,
            seconds / max(len(token_ids) - 1, 1),
            passes,
            stats.speculated_passes_total - before.speculated_passes_total,
            stats.drafted_tokens_total - before.drafted_tokens_total,
            stats.accepted_tokens_total - before.accepted_tokens_total,
        )

    def _fields(self, number: int, found: dict[str, list[tuple[Answer, ...]]]) -> dict[str, Any]:
        arm = self._arms[number]
        return {
            "name": arm.name,
            "speculators": arm.speculators,
            "size": None if arm.size is None else arm.size.num_tokens,
            "is_chain": arm.size is not None and arm.size.is_chain,
            "sets": [
                set_fields(name, [(answers[0], answers[number]) for answers in of_set])
                for name, of_set in found.items()
            ],
            "acceptance": arm.acceptance(),
            "trees": arm.engine.stats().trees_total,
        }


def set_fields(name: str, pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Return what answers to a set of prompts took, each without drafts and with them.

    Raises: EngineError if none has two tokens.
    """
    pairs = [pair for pair in pairs if len(pair[0].token_ids) > 1]
    if not pairs:
        raise EngineError(f"no answer to the prompts of {name!r} has two tokens")
    ratios = sorted(plain.seconds_per_token / speculating.seconds_per_token for plain, speculating in pairs)
    num_tokens = sum(len(plain.token_ids) - 1 for plain, _ in pairs)
    plain_s, speculating_s = (
        sum(pair[which].seconds_per_token * (len(pair[which].token_ids) - 1) for pair in pairs) for which in (0, 1)
    )
    passes = sum(speculating.passes for _, speculating in pairs)
    return {
        "set": name,
        "num_answers": len(pairs),
        "plain_tokens_per_s": num_tokens / plain_s,
        "tokens_per_s": num_tokens / speculating_s,
        "speedup": plain_s / speculating_s,
        "speedup_low": ratios[len(ratios) // 4],
        "speedup_median": statistics.median(ratios),
        "speedup_high": ratios[-1 - len(ratios) // 4],
        "passes": passes,
        "drafting_passes": sum(speculating.drafting_passes for _, speculating in pairs),
        "drafted": sum(speculating.drafted for _, speculating in pairs),
        "accepted": sum(speculating.accepted for _, speculating in pairs),
        "tokens_per_pass": num_tokens / max(passes, 1),
    }
