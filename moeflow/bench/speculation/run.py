"""Latency with speculators beside incremental decoding, prompt by prompt, in turns.

Both are engines over one loaded model, so that they differ in nothing else; that the tokens are the same is checked.
What counts is the time of a token after the first: prompts take as long either way.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError, EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.messages import Submission, TokenOutput
from moeflow.engine.runner_loading import load_runner
from moeflow.engine.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "prompts.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a set."""

    name: str  # the set's
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a prompt."""

    token_ids: list[int]
    seconds_per_token: float  # after the first
    passes: int  # after the first token's
    drafted: int
    accepted: int


def read_prompts(file: Path | None, model_path: str) -> list[Prompt]:
    """Return the prompts of a JSON file {set: [text, ...]}, as the model's chat template has them, set by set.

    Raises: ConfigError if the file has another form.
    """
    file = file or BUNDLED
    try:
        sets = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the prompts {file}: {error}") from error
    form = isinstance(sets, dict) and all(
        isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts)
        for texts in sets.values()
    )
    if not form or not sets:
        raise ConfigError(f'{file} has no prompts: {{"set": ["text", ...], ...}} is the form')
    tokenizer = Tokenizer.load(model_path)
    return [Prompt(name, _encode(tokenizer, text)) for name, texts in sets.items() for text in texts]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(text)


class SpeculationRun:
    """The two engines, and what they made of the prompts."""

    def __init__(self, config: EngineConfig, *, new_tokens: int, temperature: float) -> None:
        """Load the model. Raises: as `Engine.load`."""
        scheduler = replace(config.scheduler, prefix_caching=False)  # else an engine would find the other one's blocks
        config = replace(config, scheduler=scheduler)
        runner = load_runner(config)
        self._plain = Engine(replace(config, speculators=()), runner)
        self._speculating = Engine.over(config, runner)
        self._sampling = SamplingParams(max_tokens=new_tokens, temperature=temperature)
        self.config = config

    def __enter__(self) -> SpeculationRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()

    def answer(self, prompts: Sequence[Prompt], rounds: int, on_step: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the fields of a set's record each: both engines answer each prompt in turns, `rounds` times.

        Raises: EngineError if a pass fails, or if the tokens differ.
        """
        pairs: dict[str, list[tuple[Answer, Answer]]] = {}
        for number in range(rounds):
            for place, prompt in enumerate(prompts):
                engines = (self._plain, self._speculating)
                first = (number + place) % 2  # who goes first takes turns, too
                found = {which: self._answer(engines[which], prompt, number) for which in (first, 1 - first)}
                if found[0].token_ids != found[1].token_ids:
                    raise EngineError(f"speculation has changed the answer to a prompt of {prompt.name!r}: report it")
                pairs.setdefault(prompt.name, []).append((found[0], found[1]))
                on_step()
        return [_fields(name, of_set) for name, of_set in pairs.items()]

    def _answer(self, engine: Engine, prompt: Prompt, number: int) -> Answer:
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
            stats.drafted_tokens_total - before.drafted_tokens_total,
            stats.accepted_tokens_total - before.accepted_tokens_total,
        )


def _fields(name: str, pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
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
        "tokens_per_pass": num_tokens / max(passes, 1),
        "drafted_per_pass": sum(speculating.drafted for _, speculating in pairs) / max(passes, 1),
        "accepted_per_pass": sum(speculating.accepted for _, speculating in pairs) / max(passes, 1),
    }
