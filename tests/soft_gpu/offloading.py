"""Pipelines on the GPU in software."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from moeflow.core.engine_config import EngineConfig
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig
from moeflow.engine.offload import offloaded_model
from moeflow.pipeline.devices.cuda_device import CudaDevice
from tests.soft_gpu import device, kernels
from tests.soft_gpu.streams import SoftStreams

EMULATED = "emulated:64MiB,1000,torch"  # what configurations are first made for: it computes in torch, too


class SoftDevice(CudaDevice):
    """A device of pipelines in software."""

    def __init__(self, config: OffloadConfig) -> None:
        assert config.cuda is not None
        super().__init__(config.cuda, SoftStreams())

    def _record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Nothing outlives its launch here."""


def on_soft_gpu(config: EngineConfig) -> EngineConfig:
    """Return a configuration for `EMULATED` with the GPU in software in its place."""
    assert config.offload is not None
    capacity_bytes = config.offload.device.capacity_bytes
    cuda = CudaDeviceConfig(name=device.NAME, memory_bytes=capacity_bytes, capacity_bytes=capacity_bytes)
    return replace(config, offload=replace(config.offload, emulated=None, cuda=cuda))


@contextmanager
def soft_offloading() -> Iterator[None]:
    """Have pipelines run on the GPU in software in the block."""
    with mock.patch.object(offloaded_model, "make_device", SoftDevice), device.soft_gpu(), kernels.soft_kernels():
        yield
