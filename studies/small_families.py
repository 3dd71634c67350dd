"""Tiny random models of families, and an engine's greedy answers, to compare what devices compute."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeflow.core.engine_config import BLOCK_SIZE, EngineConfig, StateSlotsConfig
from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import MIB
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings

# Decoder families, the most different ones first.
FAMILIES: Final = (
    *("qwen3_moe", "mixtral", "gpt_oss", "llama"),
    *("deepseek_v3", "gemma4_text", "glm4_moe", "qwen2_moe"),
    *("olmoe", "phimoe", "minimax_m2", "ernie4_5_moe"),
    *("hunyuan_v1_moe", "granitemoeshared", "gemma3_text", "glm4_moe_lite"),
    *("deepseek_v2", "dots1", "granitemoe", "qwen3"),
    *("lfm2_moe", "qwen3_next", "granitemoehybrid", "qwen3_5_moe_text"),
)
Answers = dict[str, list[int]]  # tokens of each request

_SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
}
_SMALL_MIXERS: Final[Mapping[str, int]] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}
_NUM_PROMPTS: Final = 8  # further ones repeat them, and so find prefixes
_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_EXPERTS: Final = 8
_SHARED_WIDTHS: Final = ("shared_intermediate_size", "shared_expert_intermediate_size")


def write_small(family: str, folder: Path, **more: Any) -> None:
    """Write a model of two layers, 128 wide, with eight experts; `more` goes into its config."""
    from studies.random_family import BASE, SHAPES, write_model  # transformers takes seconds to import

    given = {**BASE, **SHAPES[family]}
    changes = dict(_SMALL) if family != "dbrx" else {}
    if "layer_types" in given:
        changes["layer_types"] = given["layer_types"][: _SMALL["num_hidden_layers"]]
    if "moe_intermediate_size" in given:
        changes["moe_intermediate_size"] = 64
    width = changes.get("moe_intermediate_size", _SMALL["intermediate_size"])
    changes |= {name: 2 * width for name in _SHARED_WIDTHS if name in given}
    if family != "dbrx":
        changes |= {name: _NUM_EXPERTS for name in _EXPERT_COUNTS if name in given}
    changes |= {name: size for name, size in _SMALL_MIXERS.items() if name in given}
    if "kv_lora_rank" in given:
        changes |= {"head_dim": 32, "num_key_value_heads": 4}
    if given.get("q_lora_rank"):
        changes["q_lora_rank"] = 64
    write_model(family, folder, 0, **changes | more)


def small_config(folder: Path, device: str, dtype: str, **more: Any) -> EngineConfig:
    """Return a configuration for up to 16 short requests at once, on two threads: models run beside each other."""
    limits = {"max_model_len": 112, "kv_cache_bytes": 8 * MIB, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    settings = limits | {"num_threads": 2} | more
    config = resolve(Settings(model=str(folder), device=device, dtype=dtype, kv_dtype=dtype, **settings)).config
    states = config.scheduler.states
    if states is not None:  # checkpoints within short prompts
        states = StateSlotsConfig(num_slots=states.num_slots, checkpoint_every=BLOCK_SIZE)
    return replace(config, scheduler=replace(config.scheduler, states=states))


def greedy_answers(config: EngineConfig, prompt_lens: Sequence[int], num_tokens: int) -> Answers:
    """Load an engine, and return the greedy tokens of requests that share a batch."""
    engine = Engine.load(config)
    found: Answers = {str(number): [] for number in range(len(prompt_lens))}
    try:
        for outputs in greedy_passes(engine, prompts_of(prompt_lens), num_tokens):
            for output in outputs:
                found[output.request_id] += output.token_ids
    finally:
        engine.close()
    return found


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Return fixed prompts of these lengths."""
    starts = (31 * (number % _NUM_PROMPTS) for number in range(len(lengths)))
    return [
        [(start + 7 * place) % 500 + 2 for place in range(length)]
        for start, length in zip(starts, lengths, strict=True)
    ]


def greedy_passes(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> Iterator[list[TokenOutput]]:
    """Submit a request for each prompt, and yield the outputs of each pass. Raises: RuntimeError if one fails."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Submission(str(number), prompt, sampling, seed=number))
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
        yield outputs


def equal_share(one: Answers, other: Answers) -> float:
    """Return the share of tokens that are the same."""
    return statistics.mean(a == b for name in one for a, b in zip(one[name], other[name], strict=True))
