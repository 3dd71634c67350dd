"""Shows moeflow the GPU in software as this machine's accelerator."""

from __future__ import annotations

import dataclasses
import os
import sys

import torch

from tests.soft_gpu import device


def prepare() -> None:
    """Change this process for the device. Call it before any other part of moeflow is imported.

    Inference tensors have no version counters, which the wrappers of tensors on the device need.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
    torch.inference_mode = lambda *_: torch.no_grad()  # type: ignore[assignment, misc]
    from moeflow.planner.hardware import host

    real = host.host_resources

    def with_device(*_: object) -> host.HostResources:
        return dataclasses.replace(
            real(), accelerator=device.NAME, accelerator_free_bytes=78 << 30, next_free_bytes=(78 << 30,)
        )

    for module in list(sys.modules.values()):
        if getattr(module, "host_resources", None) is real:
            module.host_resources = with_device  # type: ignore[attr-defined]
