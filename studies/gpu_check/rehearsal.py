"""Runs steps without a GPU: single kernels by Triton's interpreter, whole models on the GPU in software."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from studies.gpu_check.options import PIPELINES

if TYPE_CHECKING:
    from moeflow.core.engine_config import EngineConfig

_OF_KERNELS: Final = ("kernels", "attention", "experts")


def prepare(group: str, step: str) -> None:
    """Change this process for a step. Call it before any other part of moeflow is imported."""
    if step in _OF_KERNELS:
        os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
    else:
        from tests.soft_gpu import machine

        machine.prepare()
    if group == PIPELINES:
        from moeflow.engine.offload import offloaded_model
        from tests.soft_gpu import offloading

        offloaded_model.make_device = offloading.SoftDevice


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Have Triton's interpreter compute the kernels in the block, for tensors in main memory."""
    from moeflow.kernels.cpu import row_ops
    from moeflow.kernels.triton import launching
    from tests.kernels.triton.interpreting import exact_bfloat16, language_patched_once

    with (
        exact_bfloat16(),
        language_patched_once(),
        mock.patch.object(launching, "accepts", return_value=True),
        mock.patch.object(row_ops, "_AVAILABLE", False),
    ):
        yield


@contextmanager
def software_gpu() -> Iterator[None]:
    """Have the GPU in software in the block."""
    from tests.soft_gpu import device, kernels

    with device.soft_gpu(), kernels.soft_kernels():
        yield


def on_software_gpu(configuration: Callable[[str], EngineConfig]) -> EngineConfig:
    """Return a configuration of a pipeline on the GPU in software; `configuration` makes one for a device."""
    from tests.soft_gpu import offloading

    return offloading.on_soft_gpu(configuration(offloading.EMULATED))


def software_streams() -> Any:
    """Return the stand-in for `torch.cuda` there."""
    from tests.soft_gpu import streams

    return streams.SoftStreams()
