"""Runs of a tiny model whose experts are read from disk."""

from __future__ import annotations

from typing import Any

from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.experts.prefetch.driver import PrefetchDriver

PROMPTS = [[5, 9, 200, 31, 7], [100], list(range(40, 90)), [3, 3, 3]]


def answers(engine, prompts=PROMPTS, num_tokens=12):
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        engine.submit(Submission(f"{number}", list(prompt), sampling, seed=0))
    tokens = {f"{number}": [] for number in range(len(prompts))}
    errors = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.error:
                errors[output.request_id] = output.error
        engine.check_integrity()
    return list(tokens.values()), errors


def answers_of(config, prompts):
    engine = Engine.load(config)
    try:
        return answers(engine, prompts)
    finally:
        engine.close()


def run(config, prompts=PROMPTS):
    tokens, errors = answers_of(config, prompts)
    assert not errors
    return tokens


def follow_all(driver: PrefetchDriver[Any], *, is_on: bool = True) -> None:
    """Have a driver follow all of its sources and drafts from now on, or none."""
    for trial in driver.trials:
        trial.is_on, trial.end_pass = is_on, lambda *_: None
