"""Encoder-decoders in the engine: transformers' tokens, the same bits in any batch, and refused requests."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
import torch

from moeflow.core.engine_config import ExpertSlotsConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import ConfigError, RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.tiny_switch import write_tiny_switch, write_tiny_t5

NUM_NEW = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1)
INPUTS = [[5, 9, 200, 31], list(range(2, 75)), [7], list(range(100, 140)), list(range(60, 108)), [9, 4] * 30]
ASKED = [
    Submission(str(i), token_ids, DRAWN if i % 2 else GREEDY, seed=i, is_batch=i == 4)
    for i, token_ids in enumerate(INPUTS)
]


@pytest.fixture(scope="module", params=["switch", "t5"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "t5":
        return write_tiny_t5(folder, feed_forward_proj="gated-gelu"), folder
    return write_tiny_switch(folder, tie_word_embeddings=False), folder


def config_of(folder, **settings):
    values = {"num_threads": 1, "max_model_len": 160, "kv_cache_bytes": 2**21}
    return resolve(Settings(model=str(folder), **(values | settings))).config


def run(config, submissions=ASKED):
    """Return each request's tokens with log-probabilities, and how many were preempted."""
    with closing(Engine.load(config)) as engine:
        for submission in submissions:
            engine.submit(submission)
        found = {submission.request_id: [] for submission in submissions}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found[output.request_id] += zip(output.token_ids, output.logprobs or (), strict=True)
            engine.check_integrity()
        return found, engine.stats().preemptions_total


@pytest.fixture(scope="module")
def plain(made):
    return run(config_of(made[1]))[0]


def test_greedy_tokens_are_those_of_transformers(made, plain):
    theirs, _ = made
    for submission in ASKED[::2]:
        found = [token_id for token_id, _ in plain[submission.request_id]]
        with torch.no_grad():  # whole, as `generate` keeps too few layers where a decoder has fewer than its encoder
            logits = theirs(
                input_ids=torch.tensor([submission.prompt_token_ids]), decoder_input_ids=torch.tensor([[0, *found]])
            ).logits[0]
        assert found == logits[:-1].argmax(-1).tolist()


def test_the_same_bits_alone_in_turns_and_after_preemptions(made, plain):
    _, folder = made
    for submission in ASKED:
        assert run(config_of(folder), [submission])[0][submission.request_id] == plain[submission.request_id]
    few = config_of(folder, max_num_seqs=2, max_num_batched_tokens=96)
    assert run(few) == (plain, 0)
    scarce = config_of(folder)
    num_blocks = 12  # of 16 tokens: not enough for all
    scarce = dataclasses.replace(
        scarce, scheduler=dataclasses.replace(scarce.scheduler, num_blocks=num_blocks, max_model_len=128)
    )
    found, num_preempted = run(scarce)
    assert found == plain
    assert num_preempted > 0


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("predictor", ["none", "next-router"])
def test_experts_come_from_disk(tmp_path, monkeypatch, quantize, predictor):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    write_tiny_switch(tmp_path)
    resident = config_of(tmp_path, quantize=quantize)
    index = pack(str(tmp_path), tmp_path / "slabs", cache_dir=None, quantize=quantize)
    assert (index.spec.num_layers, index.spec.num_experts) == (3, 4)
    experts = ExpertSlotsConfig(
        packed_weights_file=str(tmp_path / "slabs"),
        num_slots=5,
        slab_bytes=index.spec.slab_bytes,
        policy="lru",
        predictor=predictor,
    )
    assert run(dataclasses.replace(resident, experts=experts))[0] == run(resident)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 2, "attention_layout": "tensor"}, "--attention-layout tensor"),
        ({"stages": "2"}, "--stages"),
        ({"speculators": ("suffix",)}, "--speculator"),
        ({"record_routing": Path("routing.moe")}, "--record-routing"),
    ],
)
def test_what_is_for_decoder_only_models_is_refused(made, settings, message):
    with pytest.raises(ConfigError, match=message):
        config_of(made[1], **settings)


def test_inputs_are_taken_up_to_a_length_that_is_said(made):
    with closing(Engine.load(config_of(made[1], max_model_len=4096, kv_cache_bytes=2**25))) as engine:
        assert engine.model.encoder.max_input_tokens == 2048
        engine.submit(Submission("long", [7] * 2048, GREEDY, seed=1))


def test_inputs_that_no_pass_takes_are_refused(made):
    with closing(Engine.load(config_of(made[1], max_num_batched_tokens=64, max_num_seqs=8))) as engine:
        with pytest.raises(RequestError, match=r"takes 48 at once.*--max-num-batched-tokens"):
            engine.submit(Submission("long", list(range(2, 60)), GREEDY, seed=1))
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        with pytest.raises(RequestError, match="log-probabilities"):
            engine.submit(Submission("scored", [5, 6], scored, seed=1))
        with pytest.raises(RequestError, match="exceed"):
            engine.submit(Submission("both", list(range(2, 40)), SamplingParams(max_tokens=150), seed=1))
        assert not engine.has_work
