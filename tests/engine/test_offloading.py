"""Models larger than an emulated device: every pipeline gives the tokens of the plain run, whatever is cut how."""

from __future__ import annotations

import dataclasses
import random

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig
from moeflow.core.offload_config import EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.messages import Submission
from moeflow.engine.offload_plan import OFFLOADING, OffloadWishes, costs_of, plan_offload
from moeflow.engine.settings import Settings, decide
from moeflow.kernels import cpu
from moeflow.models.registry import read_model_config
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=cpu.why_not())
DEVICE = EmulatedDeviceConfig(capacity_bytes=2**24, speeds=EmulatedSpeeds())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=5, num_hidden_layers=3)
    return str(folder)


def plain_config(model, **settings) -> EngineConfig:
    wishes = {
        "num_threads": 1,
        "kv_cache_bytes": 2**20,
        "max_running": 16,
        "prefix_caching": False,
        "max_model_len": 200,
    }
    return decide(Settings(model=model, **{**wishes, **settings}))


def offloaded_config(model, device=DEVICE, **wishes) -> EngineConfig:
    config = plain_config(model, **wishes.pop("settings", {}))
    checkpoint = open_checkpoint(model)
    costs = costs_of(read_model_config(checkpoint), config.weight_format, config.embedding_format, config.kv_dtype)
    checkpoint.close()
    return dataclasses.replace(
        config, offload=plan_offload(OffloadWishes(device=device, **wishes), costs, config.scheduler)
    )


def submissions(lengths, num_tokens=6):
    rng = random.Random(3)
    for number, length in enumerate(lengths):
        prompt = [rng.randrange(2, 258) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens + number % 3, ignore_eos=True)
        yield Submission(f"{number}", prompt, sampling, seed=number)


def run(config, lengths=(5, 1, 60, 17, 33, 2, 90)):
    engine = Engine.load(config)
    try:
        tokens = {}
        for submission in submissions(lengths):
            engine.submit(submission)
            tokens[submission.request_id] = []
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                tokens[output.request_id] += output.token_ids
            engine.check_integrity()
        return tokens
    finally:
        engine.close()


@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_tokens_are_those_of_the_plain_run(model, pipeline):
    expected = run(plain_config(model))
    for micro_batch, share in ((1, 0.0), (2, 0.4), (3, 1.0), (1000, 0.0)):
        config = offloaded_config(model, pipeline=pipeline, micro_batch_tokens=micro_batch, resident_experts=share)
        assert run(config) == expected
