"""Claim: where keys and values are in main memory, attending on the host takes less time than fetching them.

MoE-Lightning's figure 9, for one layer of a decoding step, over micro-batches and contexts: attention by the CPU
kernels, compared with the transfer of the same keys and values to a device. The host gathers their blocks in
page-locked memory, then they cross the link: an emulated one, or a GPU's. All take turns.

The emulated link has the share of this host's memory rate that a T4's link has of its host's, 12 of 100 GB/s: set it
accordingly. Where copies in main memory take longer than the link, the table says that the ratios are wrong.

    python -m studies.attention_places --out docs/studies/results/attention_places.jsonl
    python -m studies.attention_places mixtral-8x7b --device cuda:8GiB --micro-batch 256 --context 2048
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import click
import torch

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text, threads_text
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
from moeflow.core.units import MIB
from moeflow.kernels.attention.attention import attend
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.ceilings import measure_read
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_bare_config
from moeflow.pipeline.devices.cuda_device import CudaDevice
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.pipeline.devices.offloaded_kv import KVShape, OffloadedKV
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.model_files import shipped_models
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved, seconds
from studies.harness.records import recorder

DISTURBED: Final = 0.15  # late copies, as a share of the emulated time


class OneLayer:
    """Keys and values of a layer in main memory, and a device that holds two micro-batches of them."""

    def __init__(self, shape: ModelConfig, device: CudaDevice | EmulatedDevice, micro_batch: int, context: int) -> None:
        self._device, heads = device, shape.attention.heads_of(0)
        blocks_per_request = -(-context // BLOCK_SIZE)
        num_blocks = micro_batch * blocks_per_request
        sizes = KVShape(num_blocks=num_blocks, block_size=BLOCK_SIZE, heads=[heads], dtype=torch.bfloat16)
        host = sizes.allocate(1)
        host.layers[0].storage.view(torch.bfloat16).fill_(0.5)  # times do not depend on the values
        self.fetches_s: list[tuple[float, float]] = []  # to gather, and to cross the link
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

    def fetch(self) -> float:
        """Gather all blocks in page-locked memory, bring them to the device, and note the seconds of both."""
        gather_s = seconds(lambda: self._kv.gather(0, 0, self._all_blocks))
        self.fetches_s.append((gather_s, seconds(self._cross)))
        return sum(self.fetches_s[-1])

    def _cross(self) -> None:
        self._kv.load(0, 0, len(self._all_blocks))
        self._device.synchronize()
        self._kv.window(0, 0)

    @property
    def link_s(self) -> float:
        """The least seconds of the transfer over an emulated link; 0 for a GPU."""
        return self.num_bytes / self._device.speeds.link if isinstance(self._device, EmulatedDevice) else 0.0


def device_of(text: str) -> DeviceConfig:
    """Return the device that a text describes. Raises: ConfigError."""
    if text.split(":")[0] == PREFIX:
        return parse_emulated_device(text)
    name, asked = parse_cuda_device(text)
    memory_bytes = asked or host_resources(text).accelerator_free_bytes
    return CudaDeviceConfig(name=name, memory_bytes=memory_bytes, capacity_bytes=memory_bytes)


@click.command()
@click.argument("shape", default="mixtral-8x7b")
@click.option("--device", default=f"{PREFIX}:4GiB,3", show_default=True)
@click.option("--micro-batch", "micro_batches", multiple=True, type=int, default=(32, 64, 128), show_default=True)
@click.option("--context", "contexts", multiple=True, type=int, default=(128, 512, 2048), show_default=True)
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Measurements of each.")
@click.option("--threads", type=int, help="CPU threads: by default, all cores.")
@result_options
def main(
    shape: str,
    device: str,
    micro_batches: tuple[int, ...],
    contexts: tuple[int, ...],
    turns: int,
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
            ways: dict[str, Callable[[], float]] = {"attend": partial(seconds, layer.attend), "fetch": layer.fetch}
            attend_s = measure_interleaved(ways, turns)["attend"]
            gather_s, cross_s = zip(*layer.fetches_s[-turns:], strict=True)
            times = {"attend_ms": attend_s, "gather_ms": gather_s, "cross_ms": cross_s}
            found: Record = {name: [round(1000 * each, 3) for each in times_s] for name, times_s in times.items()}
            found |= {"link_ms": round(1000 * layer.link_s, 3), "read_bytes_per_s": measure_read(num_threads)}
            sizes = {"micro_batch": micro_batch, "context": context, "kv_bytes": layer.num_bytes}
            to.add({"shape": shape, "device": device, **sizes, **found}, seed=0, threads=num_threads)
    to.show(lambda records: [table(records)])


def fetch_ms(record: Record) -> list[float]:
    """Return the times of both steps of a fetch."""
    return [sum(steps) for steps in zip(record["gather_ms"], record["cross_ms"], strict=True)]


def table(records: Sequence[Record]) -> Table:
    """Return all times, and their ratios."""
    rows = []
    for record in records:
        attend, fetch = record["attend_ms"], fetch_ms(record)
        rate = record["kv_bytes"] / statistics.median(attend) * 1000
        cross_rate = record["kv_bytes"] / statistics.median(record["cross_ms"]) * 1000
        rows.append(
            (
                f"{record['micro_batch']} x {record['context']}",
                f"{record['kv_bytes'] / MIB:.0f} MiB",
                spread_text(attend, 2),
                f"{rate / record['read_bytes_per_s']:.0%}",
                spread_text(record["gather_ms"], 2),
                spread_text(record["cross_ms"], 2),
                f"{cross_rate / 1e9:.1f}",
                f"{statistics.median(fetch) / statistics.median(attend):.2f}",
            )
        )
    columns = (
        "requests x context",
        "keys and values",
        "attend, ms",
        "of memory's rate",
        "gather, ms",
        "cross, ms",
        "cross, GB/s",
        "fetch / attend",
    )
    first, read = records[0], [record["read_bytes_per_s"] / 1e9 for record in records]
    notes = [
        f"{threads_text(first)}; this host reads {spread_text(read)} GB/s. A fetch gathers blocks, then these cross "
        "the link."
    ]
    late = [statistics.median(record["cross_ms"]) / link for record in records if (link := record["link_ms"])]
    if max(late, default=1.0) > 1 + DISTURBED:
        notes.append(f"Copies took up to {max(late):.1f} times as long as the emulated link: do not trust the ratios.")
    return Table(
        f"A layer of {first['shape']}, {first['device']}: median (min-max)", columns, tuple(rows), tuple(notes)
    )


if __name__ == "__main__":
    run_study(main)
