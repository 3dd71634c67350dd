"""The engine on a real (random, tiny) model: the tokens are transformers' own, whatever shares the batch."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_tiny_mixtral(folder)


def load(folder, num_blocks: int = 40, **changes) -> Engine:
    config = resolve(
        Settings(model=str(folder), num_threads=1, max_num_seqs=8, max_num_batched_tokens=24, dtype="float32")
    ).config
    scheduler = dataclasses.replace(config.scheduler, num_blocks=num_blocks, max_model_len=160, **changes)
    return Engine.load(dataclasses.replace(config, scheduler=scheduler))


def run(engine: Engine, submissions: list[Submission]) -> dict[str, list[TokenOutput]]:
    for submission in submissions:
        engine.submit(submission)
    outputs: dict[str, list[TokenOutput]] = {submission.request_id: [] for submission in submissions}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def jobs(count: int, **sampling) -> list[Submission]:
    rng = random.Random(1)
    shared = [rng.randrange(2, 258) for _ in range(40)]
    result = []
    for index in range(count):
        own = [rng.randrange(2, 258) for _ in range(rng.randrange(1, 60))]
        prompt = shared[: rng.choice([0, 20, 40])] + own
        params = SamplingParams(**{"max_tokens": rng.randrange(5, 30), "ignore_eos": True, **sampling})
        result.append(Submission(f"r{index}", prompt, params, seed=index))
    return result


def test_greedy_tokens_are_those_of_transformers(tiny):
    folder, oracle = tiny
    engine = load(folder)
    submissions = jobs(12, temperature=0.0)
    outputs = run(engine, submissions)
    for submission in submissions:
        ids = torch.tensor([submission.prompt_token_ids])
        new = submission.sampling.max_tokens
        expected = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        # min_new_tokens bars EOS, which ignore_eos does not: compare up to where we took it
        mine = tokens(outputs[submission.request_id])
        stop = mine.index(1) if 1 in mine else new
        assert mine[:stop] == expected[0, ids.shape[1] :].tolist()[:stop]
    assert engine.stats().prefix_hit_tokens_total > 0


def test_preempted_requests_get_the_same_tokens(tiny):
    folder, _ = tiny
    submissions = jobs(10, temperature=0.0, max_tokens=50)
    roomy, tight = load(folder, num_blocks=80), load(folder, num_blocks=13)
    expected = run(roomy, submissions)
    outputs = run(tight, submissions)
    assert roomy.stats().preemptions_total == 0
    assert tight.stats().preemptions_total > 0
    assert {name: tokens(out) for name, out in outputs.items()} == {name: tokens(out) for name, out in expected.items()}


def test_sampled_tokens_depend_on_the_seed_alone(tiny):
    folder, _ = tiny
    engine = load(folder, prefix_caching=False)
    submissions = jobs(6, temperature=1.0, top_p=0.9, frequency_penalty=0.5)
    together = run(engine, submissions)
    alone = {s.request_id: tokens(run(engine, [s])[s.request_id]) for s in submissions}
    assert {name: tokens(out) for name, out in together.items()} == alone
    reseeded = [Submission(s.request_id, s.prompt_token_ids, s.sampling, s.seed + 1) for s in submissions]
    assert {name: tokens(out) for name, out in run(engine, reseeded).items()} != alone


def test_logprobs_are_those_of_the_models_distribution(tiny):
    folder, oracle = tiny
    (submission,) = jobs(1, temperature=0.0, logprobs=3, prompt_logprobs=2)
    outputs = run(load(folder), [submission])["r0"]
    prompt, new = submission.prompt_token_ids, tokens(outputs)
    with torch.inference_mode():
        reference = torch.log_softmax(oracle(torch.tensor([prompt + new])).logits[0].float(), dim=-1)
    assert outputs[0].prompt_logprobs[0] is None
    for position, entry in enumerate(outputs[0].prompt_logprobs[1:], 1):
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(reference[position - 1, prompt[position]].item(), abs=1e-4)
    for index, output in enumerate(outputs):
        (entry,) = output.logprobs
        row = reference[len(prompt) + index - 1]
        assert entry.logprob == pytest.approx(row[new[index]].item(), abs=1e-4)
        assert (entry.rank, [t for t, _ in entry.top]) == (1, row.topk(3).indices.tolist())
