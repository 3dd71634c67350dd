"""A request continued by another engine at any token equals the uninterrupted one: with a real sampler."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.processes.continuation import Continuation
from moeflow.settings.settings import Settings
from tests.tiny_mixtral import write_tiny_mixtral

NUM_TOKENS = 20
PROMPT = [5, 9, 30, 7, 5, 5, 61, 8, 100, 101, 7, 3, 44, 12, 9, 9, 2, 18]
KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3, "top_p": 0.95, "top_k": 100},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "sampled with penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "frequency_penalty": 0.9},
    "log-probabilities": {"temperature": 1.0, "logprobs": 4, "prompt_logprobs": 2},
    "held back from ending": {"temperature": 2.0, "min_tokens": 12, "ignore_eos": False, "stop_token_ids": range(60)},
    "bias": {"temperature": 0.9, "logit_bias": {7: 4.0, 9: -100.0}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=512)
    settings = Settings(model=str(folder), num_threads=1, max_num_seqs=4, max_num_batched_tokens=16)
    loaded = Engine.load(resolve(settings).config)
    yield loaded
    loaded.close()


def submission(name: str, **sampling) -> Submission:
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    if "stop_token_ids" in options:
        options["stop_token_ids"] = tuple(options["stop_token_ids"])
    return Submission(name, PROMPT, SamplingParams(**options), seed=11)


def run(engine: Engine, *submissions: Submission) -> list[TokenOutput]:
    """Return the outputs of the first, without its waiting time; the others share its passes."""
    for each in submissions:
        engine.submit(each)
    outputs = []
    while engine.has_work:
        outputs += [output for output in engine.step() if output.request_id == submissions[0].request_id]
        engine.check_integrity()
    return [msgspec.structs.replace(output, queued_s=None) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_it_goes_on_as_if_it_had_not_been(engine, kind):
    asked = submission("r", **KINDS[kind])
    whole = run(engine, asked)
    assert whole[-1].finish_reason is not None
    if kind == "held back from ending":
        assert whole[-1].finish_reason is FinishReason.STOP
    mates = (submission("greedy-mate", temperature=0), submission("drawn-mate", temperature=0.7))
    for cut in range(len(whole)):
        request = Continuation(asked)
        for output in whole[:cut]:
            request.receive(output)
        for output in run(engine, request.rest(), *(mates if cut % 3 == 1 else ())):
            request.receive(output)
        found = [request.outputs.get_nowait() for _ in range(request.outputs.qsize())]
        if cut == 0:  # nothing had been said of it: what the prefix tree saves is its second engine's word
            num_cached = whole[0].num_cached_tokens
            found = [msgspec.structs.replace(each, num_cached_tokens=num_cached) for each in found]
        assert found == whole
