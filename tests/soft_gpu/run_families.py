"""Runs tiny models of families on the processor and on the GPU in software, and prints what came of it as JSON.

python -m tests.soft_gpu.run_families FAMILY...
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# Inference tensors have no version counters, which the wrappers of tensors on the device need.
torch.inference_mode = lambda *_: torch.no_grad()  # type: ignore[assignment, misc]

from moeflow.core.engine_config import BLOCK_SIZE, EngineConfig, StateSlotsConfig  # noqa: E402
from moeflow.core.engine_messages import Submission  # noqa: E402
from moeflow.core.sampling_params import SamplingParams  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from moeflow.planner.hardware import host  # noqa: E402
from moeflow.planner.resolve import resolve  # noqa: E402
from moeflow.settings.settings import Settings  # noqa: E402
from studies.random_family import BASE, SHAPES, write_model  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402

SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
SMALL_MIXERS: Mapping[str, int] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_EXPERTS = 8
NUM_TOKENS = 6
NUM_PROMPTS = 8  # further ones repeat them, and so find prefixes
BATCHES = (1, 3, 16)


def main(families: list[str]) -> None:
    """Print one object for each family."""
    _show_device()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({family: _compare(family, Path(folder, family)) for family in families}))


def _show_device() -> None:
    """Have every part of moeflow see the device as this machine's accelerator."""
    real = host.host_resources

    def with_device(_: str = "cpu") -> host.HostResources:
        return dataclasses.replace(real(), accelerator=device.NAME, accelerator_free_bytes=78 << 30)

    for module in list(sys.modules.values()):
        if getattr(module, "host_resources", None) is real:
            module.host_resources = with_device  # type: ignore[attr-defined]


def _compare(family: str, folder: Path) -> dict[str, Any]:
    """Return whether both give the same tokens, and the counts of the last decode pass for each batch."""
    write_model(family, folder, 0, **_small(family))
    found: dict[str, Any] = {}
    for batch in BATCHES:
        lengths = [(5, 1, 33, 17)[number % 4] for number in range(batch)]
        expected, _ = _run(_config(folder, "cpu"), lengths)
        config = _config(folder, device.NAME)
        with device.soft_gpu(), kernels.soft_kernels():
            got, counts = _run(config, lengths)
        found[str(batch)] = {"is_equal": got == expected, **counts}
    return found


def _small(family: str) -> dict[str, Any]:
    given = {**BASE, **SHAPES[family]}
    changes = dict(SMALL) if family != "dbrx" else {}
    if "layer_types" in given:
        changes["layer_types"] = given["layer_types"][: SMALL["num_hidden_layers"]]
    if "moe_intermediate_size" in given:
        changes["moe_intermediate_size"] = 64
    if family != "dbrx":
        changes |= {name: NUM_EXPERTS for name in EXPERT_COUNTS if name in given}
    changes |= {name: size for name, size in SMALL_MIXERS.items() if name in given}
    if "kv_lora_rank" in given:
        changes |= {"head_dim": 32, "num_key_value_heads": 4}
    return changes


def _config(folder: Path, name: str) -> EngineConfig:
    settings = Settings(
        model=str(folder),
        device=name,
        dtype="float32",
        max_model_len=112,
        kv_cache_bytes=8 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=96,
    )
    config = resolve(settings).config
    states = config.scheduler.states
    if states is not None:  # checkpoints within short prompts
        states = StateSlotsConfig(num_slots=states.num_slots, checkpoint_every=BLOCK_SIZE)
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, states=states))


def _run(config: EngineConfig, lengths: list[int]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Return the tokens of greedy answers, and the counts of the last pass that continues all of them."""
    engine = Engine.load(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(lengths))}
    for number, length in enumerate(lengths):
        prompt = [(31 * (number % NUM_PROMPTS) + 7 * place) % 500 + 2 for place in range(length)]
        engine.submit(Submission(str(number), prompt, sampling, seed=number))
    counts: dict[str, Any] = {}
    num_cached: dict[str, int] = {}
    while engine.has_work:
        device.COUNTS.clear()
        outputs = engine.step()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            answers[output.request_id] += output.token_ids
            num_cached[output.request_id] = output.num_cached_tokens
        if len(outputs) == len(lengths):
            counts = device.COUNTS.report()
    engine.close()
    return answers, {"num_cached": sum(num_cached.values()), **counts}


if __name__ == "__main__":
    main(sys.argv[1:])
