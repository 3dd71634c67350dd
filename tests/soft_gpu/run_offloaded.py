"""Runs a tiny model by pipelines on the processor and on the GPU in software, and prints what came of it as JSON.

python -m tests.soft_gpu.run_offloaded PIPELINE...
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.soft_gpu import machine

machine.prepare()

import torch  # noqa: E402

from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.core.offload_config import CudaDeviceConfig, OffloadConfig  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from moeflow.engine.offload import offloaded_model  # noqa: E402
from moeflow.pipeline.devices.cuda_device import CudaDevice  # noqa: E402
from studies.small_families import Answers, greedy_passes, prompts_of, small_config, write_small  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402

NUM_TOKENS = 6
LENGTHS = (5, 1, 33, 14, 60)
MICRO_BATCH = 2


class _Stream:
    """Does nothing: work is done when it is launched."""

    def wait_event(self, _: Any) -> None:
        """Wait for an event."""


class _Streams:
    """Stands in for `torch.cuda` where everything is done at once."""

    def Stream(self, _: torch.device) -> _Stream:
        """Make a stream."""
        return _Stream()

    def Event(self, **_: Any) -> SimpleNamespace:
        """Make an event."""
        return SimpleNamespace(record=lambda _: None, synchronize=lambda: None)

    def stream(self, _: Any) -> nullcontext[None]:
        """Launch on a stream."""
        return nullcontext()

    def device(self, _: torch.device) -> nullcontext[None]:
        """Choose a device."""
        return nullcontext()

    def synchronize(self, _: torch.device) -> None:
        """Wait for everything."""

    def cudart(self) -> SimpleNamespace:
        """Return what page-locks memory."""
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)

    def check_error(self, _: int) -> None:
        """Raise for an error."""


class _SoftDevice(CudaDevice):
    def __init__(self, config: OffloadConfig) -> None:
        assert config.cuda is not None
        super().__init__(config.cuda, _Streams())

    def _record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Nothing outlives its launch here."""


@contextmanager
def _soft_offloading() -> Iterator[None]:
    with mock.patch.object(offloaded_model, "make_device", _SoftDevice), device.soft_gpu(), kernels.soft_kernels():
        yield


def main(pipelines: list[str]) -> None:
    """Print one object for each pipeline."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_small("mixtral", folder, initializer_range=0.1)
        plain, _ = _run(small_config(folder, "cpu", "float32"))
        print(json.dumps({pipeline: _compare(folder, pipeline, plain) for pipeline in pipelines}))


def _compare(folder: Path, pipeline: str, plain: Answers) -> dict[str, Any]:
    """Return whether the tokens are those of the plain run, and the counts of the last decode pass."""
    more = {"pipeline": pipeline, "micro_batch": MICRO_BATCH, "resident_experts": 0.4}
    config = small_config(folder, "emulated:64MiB,1000,torch", "float32", **more)
    assert config.offload is not None
    cuda = CudaDeviceConfig(name=device.NAME, memory_bytes=1 << 26, capacity_bytes=1 << 26)
    config = replace(config, offload=replace(config.offload, emulated=None, cuda=cuda))
    with _soft_offloading():
        found, counts = _run(config)
    return {"is_equal": found == plain, **counts}


def _run(config: EngineConfig) -> tuple[Answers, dict[str, Any]]:
    engine = Engine.load(config)
    answers: Answers = {str(number): [] for number in range(len(LENGTHS))}
    counts: dict[str, Any] = {}
    try:
        for outputs in greedy_passes(engine, prompts_of(LENGTHS), NUM_TOKENS):
            for output in outputs:
                answers[output.request_id] += output.token_ids
            counts = device.COUNTS.report()
            device.COUNTS.clear()
    finally:
        engine.close()
    return answers, counts


if __name__ == "__main__":
    main(sys.argv[1:])
