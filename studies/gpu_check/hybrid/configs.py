"""Configurations whose experts are on the GPU and on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeflow.core.engine_config import EngineConfig
from moeflow.core.hybrid_config import HybridConfig
from moeflow.kernels.cpu import extension
from studies.gpu_check.resident.target import Target


def hybrid(config: EngineConfig, num_gpu_experts: int, stream_tokens: int = 0) -> EngineConfig:
    """Return a configuration for the GPU with so many of each layer's experts there."""
    shares = HybridConfig(
        num_gpu_experts=num_gpu_experts,
        cpu_weight_format=config.weight_format,
        cpu_isa=extension.best_isa(""),
        stream_tokens=stream_tokens,
    )
    return replace(config, hybrid=shares)


def torch_device(target: Target) -> torch.device:
    """Return the device of whole models: in a rehearsal, the GPU in software."""
    return torch.device(target.engine_device)
