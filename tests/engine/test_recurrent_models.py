"""Models with recurrent layers in the engine: the same bits however prompts are cut, shared, preempted."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from moeflow.core.engine_config import StateSlotsConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import ConfigError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.tiny_granite_hybrid import write_tiny_granite_hybrid
from tests.tiny_lfm2 import write_tiny_lfm2

WRITERS = {"short convolutions": write_tiny_lfm2, "mamba2 and experts": write_tiny_granite_hybrid}


@pytest.fixture(scope="module", params=WRITERS)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, WRITERS[request.param](folder)


def load(folder, *, num_slots: int = 12, every: int = 16, num_tokens: int = 24, **changes) -> Engine:
    config = resolve(
        Settings(model=str(folder), num_threads=1, max_num_seqs=8, max_num_batched_tokens=num_tokens, dtype="float32")
    ).config
    assert config.scheduler.states is not None
    states = StateSlotsConfig(num_slots=num_slots, checkpoint_every=every)
    scheduler = dataclasses.replace(
        config.scheduler, **{"num_blocks": 60, "max_model_len": 200, "states": states} | changes
    )
    return Engine.load(dataclasses.replace(config, scheduler=scheduler))


def run(engine: Engine, submissions: list[Submission]) -> dict[str, list[tuple[int, float]]]:
    """Return the tokens of each request and their log-probabilities."""
    for submission in submissions:
        engine.submit(submission)
    found: dict[str, list[tuple[int, float]]] = {submission.request_id: [] for submission in submissions}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += [
                (token, logprobs.logprob)
                for token, logprobs in zip(output.token_ids, output.logprobs or [], strict=True)
            ]
        engine.check_integrity()
    return found


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 258) for _ in range(length)]


def submission(name: str, prompt: list[int], max_tokens: int = 12) -> Submission:
    return Submission(
        name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0), seed=1
    )


def jobs(max_tokens: int = 8) -> list[Submission]:
    shared = prompt_of(0, 70)
    return [
        submission(
            f"r{number}", shared[: 35 * (number % 3)] + prompt_of(number + 1, 1 + 9 * number), max_tokens + number
        )
        for number in range(8)
    ]


def test_tokens_are_those_of_transformers(tiny):
    folder, oracle = tiny
    found = run(load(folder), jobs())
    for job in jobs():
        mine = [token for token, _ in found[job.request_id]]
        theirs = oracle.generate(
            torch.tensor([job.prompt_token_ids]), max_new_tokens=job.sampling.max_tokens, do_sample=False
        )[0, len(job.prompt_token_ids) :].tolist()
        assert mine[: len(theirs)] == theirs  # which end with EOS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 9},
        {"num_tokens": 512},
        {"prefix_caching": False},
        {"num_blocks": 13},  # requests are preempted
        {"num_slots": 2},
        {"num_slots": 3, "every": 32},
    ],
)
def test_bits_are_the_same_however_the_work_is_cut(tiny, changes):
    folder, _ = tiny
    engine = load(folder, **changes)
    is_tight = "num_blocks" in changes
    submissions, alone = jobs(50 if is_tight else 8), load(folder, prefix_caching=False)
    found = run(engine, submissions)
    for job in submissions:
        assert found[job.request_id] == run(alone, [job])[job.request_id]
    if is_tight:
        assert engine.stats().preemptions_total > 0


def test_a_second_turn_goes_on_from_the_last_checkpoint_with_the_same_bits(tiny):
    folder, _ = tiny
    engine = load(folder, num_tokens=512)
    prompt = prompt_of(5, 50)
    answer = run(engine, [submission("a", prompt, 20)])["a"]
    history = [*prompt, *[token for token, _ in answer], *prompt_of(6, 5)]
    before = engine.stats().prefix_hit_tokens_total
    found = run(engine, [submission("b", history)])
    assert engine.stats().prefix_hit_tokens_total - before == 64  # of 70 that were computed
    assert found == run(load(folder), [submission("b", history)])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_ranks": 2}, "--ranks"),
        ({"stages": "2"}, "--stages"),
        ({"speculators": ("suffix",)}, "--speculator"),
        ({"quantize": "q4_k_m"}, "q4_k_m"),
        ({"device": "emulated:64MiB,1"}, "--device.* do not go with recurrent layers"),
    ],
)
def test_what_does_not_go_with_states_is_refused(tiny, settings, name):
    folder, _ = tiny
    with pytest.raises(ConfigError, match=name):
        resolve(Settings(model=str(folder), **settings))
