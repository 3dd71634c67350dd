"""Claim: where keys and values are in main memory, attending on the host takes less time than fetching them.

MoE-Lightning's figure 9, for one layer of a decoding step, over micro-batches and contexts: attention by the CPU
kernels, compared with the transfer of the same keys and values to a device. The transfer gathers the blocks, then
crosses the link: an emulated one, or a GPU's. Both take turns; each figure is a median.

    python -m studies.attention_places mixtral-8x7b --device emulated:2GiB,12
    python -m studies.attention_places mixtral-8x7b --device cuda:8GiB --micro-batch 256 --context 2048
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import (
    PREFIX,
    CudaDeviceConfig,
    DeviceConfig,
    parse_cuda_device,
    parse_emulated_device,
)
from moeflow.kernels.attention.attention import attend
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.pipeline.devices.offloaded_kv import KVShape, OffloadedKV
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.model_files import shipped_models
from studies.harness.command import run_study
from studies.harness.records import recorder

TURNS = 3


class OneLayer:
    """Keys and values of a layer in main memory, and a device that holds two micro-batches of them."""

    def __init__(self, shape: ModelConfig, device: CudaDevice | EmulatedDevice, micro_batch: int, context: int) -> None:
        self._device, heads = device, shape.attention.heads_of(0)
        blocks_per_request = -(-context // BLOCK_SIZE)
        num_blocks = micro_batch * blocks_per_request
        sizes = KVShape(num_blocks=num_blocks, block_size=BLOCK_SIZE, heads=[heads], dtype=torch.bfloat16)
        host = sizes.allocate(1)
        host.layers[0].storage.view(torch.bfloat16).fill_(0.5)  # times do not depend on the values
        self._kv = OffloadedKV(sizes, device, num_resident=0, window_blocks=num_blocks)
        self._kv.begin_pass(host)
        self._all_blocks = torch.arange(num_blocks)
        self.num_bytes = num_blocks * sizes.block_bytes(0)
        self._queries = torch.full((micro_batch, shape.attention.num_heads, heads.head_dim), 0.5)
        starts = [number * blocks_per_request for number in range(micro_batch)]
        self._metadata = AttentionMetadata.build(
            starts=[context - 1] * micro_batch,
            num_tokens=[1] * micro_batch,
            block_ids=[range(start, start + blocks_per_request) for start in starts],
            block_size=BLOCK_SIZE,
            device="cpu",
        )

    def attend(self) -> None:
        """Attend on the host."""
        attend(self._queries, self._kv.layer(0), self._metadata)

    def fetch(self) -> None:
        """Bring all blocks to the device."""
        self._kv.gather(0, 0, self._all_blocks)
        self._kv.load(0, 0, len(self._all_blocks))
        self._device.synchronize()
        self._kv.window(0, 0)


def medians(ways: Sequence[Callable[[], None]]) -> list[float]:
    """Return the median seconds of each way; turns alternate, and the first does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(TURNS + 1):
        for way, seconds in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in times]


def device_of(text: str) -> DeviceConfig:
    """Return the device that a text describes. Raises: ConfigError."""
    if text.split(":")[0] == PREFIX:
        return parse_emulated_device(text)
    name, asked = parse_cuda_device(text)
    memory_bytes = asked or host_resources(text).accelerator_free_bytes
    return CudaDeviceConfig(name=name, memory_bytes=memory_bytes, capacity_bytes=memory_bytes)


@click.command()
@click.argument("shape", default="mixtral-8x7b")
@click.option("--device", default=f"{PREFIX}:2GiB,12", show_default=True)
@click.option("--micro-batch", "micro_batches", multiple=True, type=int, default=(8, 16, 32), show_default=True)
@click.option("--context", "contexts", multiple=True, type=int, default=(128, 256, 512), show_default=True)
@click.option("--threads", type=int, help="CPU threads: by default, all cores.")
@result_options
def main(
    shape: str,
    device: str,
    micro_batches: tuple[int, ...],
    contexts: tuple[int, ...],
    threads: int | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure attention on the host, and the transfer of its keys and values."""
    config, where = read_bare_config(shipped_models().get(shape) or Path(shape)), device_of(device)
    num_threads = threads or host_resources().num_cores
    if extension.is_available():
        extension.set_num_threads(num_threads)
    to = recorder("attention_places", out, as_json=as_json)
    for micro_batch in micro_batches:
        for context in contexts:
            made = CudaDevice(where) if isinstance(where, CudaDeviceConfig) else EmulatedDevice(where)
            layer = OneLayer(config, made, micro_batch, context)
            attend_s, fetch_s = medians([layer.attend, layer.fetch])
            sizes = {"micro_batch": micro_batch, "context": context, "kv_bytes": layer.num_bytes}
            found = {"attend_ms": round(1000 * attend_s, 3), "fetch_ms": round(1000 * fetch_s, 3)}
            to.add({"shape": shape, "device": device, **sizes, **found}, seed=0, threads=num_threads)
    to.show(lambda records: [table(records)])


def table(records: Sequence[Record]) -> Table:
    """Return both times, and their ratio."""
    rows = [
        (
            str(record["micro_batch"]),
            str(record["context"]),
            f"{record['attend_ms']:.2f}",
            f"{record['fetch_ms']:.2f}",
            f"{record['fetch_ms'] / record['attend_ms']:.2f}",
        )
        for record in records
    ]
    title = f"A layer of {records[0]['shape']}, {records[0]['device']}"
    return Table(title, ("micro-batch", "context", "attend, ms", "fetch, ms", "fetch / attend"), tuple(rows))


if __name__ == "__main__":
    run_study(main)
