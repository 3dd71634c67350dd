"""Models and engines that the steps compare."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from moeflow.core.engine_config import EngineConfig
from moeflow.planner.model_files import shipped_models
from studies.gpu_check import rehearsal
from studies.gpu_check.options import SOFTWARE, is_rehearsal
from studies.hollow_model import write_hollow_mixtral
from studies.small_families import Answers, greedy_answers, small_config

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
PROMPT_LENS = (5, 1, 60, 17, 33)
NUM_TOKENS = 6


def shaped(folder: Path, sizes: dict[str, int]) -> Path:
    """Write a Mixtral of these sizes, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(shipped_models()["mixtral-8x7b"].read_text(encoding="utf-8")) | sizes
    (folder / "shape.json").write_text(json.dumps(config), encoding="utf-8")
    write_hollow_mixtral(folder / "shape.json", folder / "model")
    return folder / "model"


def pipeline_on(
    options: argparse.Namespace, folder: Path, name: str, dtype: str, micro_batch: int, share: float
) -> EngineConfig:
    """Return a configuration for a pipeline on the device."""
    sizes = {"micro_batch": micro_batch, "prompt_micro_batch": micro_batch}
    more = {"pipeline": name, "resident_experts": share, **sizes}
    if is_rehearsal(options):
        return rehearsal.on_software_gpu(lambda device: small_config(folder, device, dtype, **more))
    return small_config(folder, options.device.format(memory="2GiB"), dtype, **more)


def answers(config: EngineConfig, prompt_lens: Sequence[int] = PROMPT_LENS) -> Answers:
    """Return greedy tokens of a few requests that share a batch."""
    is_soft = config.offload is not None and config.offload.torch_device == SOFTWARE
    with rehearsal.software_gpu() if is_soft else nullcontext():
        return greedy_answers(config, prompt_lens, NUM_TOKENS)
