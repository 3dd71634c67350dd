"""Stands in for the Triton kernels on the GPU in software: counts their launches and computes their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from moeflow.engine import decode_graphs
from moeflow.kernels import norm
from moeflow.kernels.triton import launching
from moeflow.kernels.triton import norm as triton_norm
from tests.soft_gpu.device import SoftTensor, count_launch, raw, wrapped


class _Rerun:
    """Stands in for a CUDA graph: computes the pass again, into the same tensor."""

    def __init__(self, run: Callable[[], Any], hidden: Any) -> None:
        self._run, self._hidden = run, hidden

    def replay(self) -> None:
        self._hidden.copy_(self._run())


def _capture(run: Callable[[], Any], pool: None) -> tuple[_Rerun, Any]:
    hidden = run().clone()
    return _Rerun(run, hidden), hidden


@contextmanager
def soft_kernels() -> Iterator[None]:
    """Have tensors on the device taken by the kernels' stand-ins in the block."""
    with (
        mock.patch.object(launching, "accepts", lambda x: isinstance(x, SoftTensor)),
        mock.patch.object(decode_graphs, "capture", _capture),
        mock.patch.object(decode_graphs, "memory_pool", return_value=None),
        mock.patch.object(triton_norm, "rms_norm", _counted(norm.rms_norm)),
        mock.patch.object(triton_norm, "layer_norm", _counted(norm.layer_norm)),
    ):
        yield


def _counted(reference: Any, num_launches: int = 1) -> Any:
    def run(*arguments: Any, **named: Any) -> Any:
        count_launch(reference.__name__, num_launches)
        out = reference(*tree_map(raw, arguments), **tree_map(raw, named))
        return tree_map(lambda x: wrapped(x) if isinstance(x, torch.Tensor) else x, out)

    return run
