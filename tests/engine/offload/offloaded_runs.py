"""Runs of a tiny model on a device that is smaller than it, beside plain ones."""

from __future__ import annotations

import dataclasses
import random

import torch
from transformers import LlamaConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.models.parity import SHAPE
from tests.models.test_gemma4_text import CONFIGS

DEVICE = "emulated:16MiB,1000"
LENGTHS = (5, 1, 60, 17, 33, 2, 90)
FAMILIES = {
    "heads that differ, normalised values": CONFIGS["as published"],
    "dense, heads that differ": CONFIGS["dense"],
    "llama": LlamaConfig(**SHAPE),
    "one layer": MixtralConfig(**{**SHAPE, "num_hidden_layers": 1}, num_local_experts=4),
    "sliding window": MixtralConfig(**{**SHAPE, "num_hidden_layers": 2}, num_local_experts=4, sliding_window=7),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3, clip_qkv=0.5),
    "shared experts": Qwen2MoeConfig(
        **SHAPE,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
    ),
    "dense layers": Qwen3MoeConfig(
        **SHAPE, head_dim=8, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=3, mlp_only_layers=[1]
    ),
}


def config(model, **settings) -> EngineConfig:
    limits = {
        "num_threads": 1,
        "kv_cache_bytes": 2**20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "max_model_len": 112,
    }
    return resolve(Settings(model=model, **{**limits, **settings})).config


def offloaded(model, pipeline, micro_batch, share=0.0, device=DEVICE, **settings) -> EngineConfig:
    sizes = {"micro_batch": micro_batch, "prompt_micro_batch": micro_batch}
    overrides = {"pipeline": pipeline, "resident_experts": share, **sizes}
    return config(model, device=device, **{**overrides, **settings})


def answers(engine, lengths=LENGTHS, num_tokens=5):
    rng = random.Random(3)
    tokens, errors = {}, []
    for number, length in enumerate(lengths):
        prompt = [rng.randrange(2, engine.model.vocab_size) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens + number % 3, ignore_eos=True)
        engine.submit(Submission(f"{number}", prompt, sampling, seed=number))
        tokens[f"{number}"] = []
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            errors += [output.error] if output.error else []
        engine.check_integrity()
    return tokens, errors


def run(config, lengths=LENGTHS, num_tokens=5):
    engine = Engine.load(config)
    try:
        tokens, errors = answers(engine, lengths, num_tokens)
        assert not errors
        return tokens
    finally:
        engine.close()


def sharing(config, num_hosted) -> EngineConfig:
    return dataclasses.replace(config, offload=dataclasses.replace(config.offload, num_hosted_experts=num_hosted))


class Served:
    """An offloaded model, as `Cache` wants one."""

    def __init__(self, runner):
        self.config = runner._model.config
        self.dtype = runner._kv.layers[0].dtype
        self._model = runner._model

    @torch.inference_mode()
    def __call__(self, token_ids, context):
        return self._model(token_ids, context)

    @torch.inference_mode()
    def logits(self, hidden):
        return self._model.logits(hidden)
