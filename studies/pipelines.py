"""Claim: where the model does not fit the device, CGOPipe decodes 1.5 times as fast as the best of the others.

All pipelines run the same model with the same kernels, and a device with the same memory, link and speeds: an emulated
one, whose processor, host and link relate to each other as those of a T4 and its host do. Each fills the device with
experts that stay. Caps may be said as shares of the model: in MoE-Lightning's settings S1 and S2 a T4 has 0.17 of a
Mixtral 8x7B, an L4 0.26, and their host 2.06; then there are as many requests as the host has room for. The size of
micro-batches may follow a pipeline's name, so that each is taken at its own best. "cgopipe" leaves all experts to the
device, as published; in "cgopipe+host" the host computes some, as many as it finds to be best while it warms up.

Requests stand in the middle of their answers: keys and values of 32 to 128 tokens each, made up, the same for all
pipelines, and each step decodes one token of each. Pipelines take turns, round after round; all must give the same
tokens. Zero-inference keeps keys and values on the device, so that fewer requests fit: as many as do. A turn is whole
passes with sampling; the first of each are not counted, and one in which real work was late by more than the emulation
can hide (another program took the processor) is made again. Link idle is the share of a turn without transfers to the
device. Overlap is the time in which link and device both work, as a share of the shorter work.

    python -m studies.pipelines MODEL --quantize int4 --device-share 0.26 --host-share 2.06 \\
        --pipeline cgopipe+host:48 --pipeline cgopipe:32 --pipeline fastdecode:128 \\
        --out docs/studies/results/pipelines.jsonl
    python -m studies.hollow_model mixtral-8x7b FOLDER --narrow 4
    python -m studies.pipelines FOLDER --quantize int4 --device emulated:1GiB,0.3,t4 --device-share 0.17 \\
        --host-share 2.06 --out docs/studies/results/pipelines.jsonl

With `--balance 1`, device and host are as fast as the link, so that every wait shows. With `--streams`, the emulated
device has the streams of a GPU: one thread launches, and the same code runs as on CUDA. There tokens may differ, too:

    python -m studies.pipelines FOLDER --device emulated:24MiB,0.02,torch --balance 1 --streams --threads 1 \\
        --requests 64 --micro-batch 8 --rounds 1

On a GPU, whose memory is capped, they come one after the other, each with buffers of its own. There bfloat16 rounds
differently in other micro-batches: the share of equal tokens is given instead. Idle times are by CUDA events:

    python -m studies.hollow_model mixtral-8x7b FOLDER
    python -m studies.pipelines FOLDER --device cuda:16GiB --requests 512 --micro-batch 64 --out gpu.jsonl
    python -m studies.pipelines FOLDER --device cuda:24GiB --requests 512 --micro-batch 64 --out gpu.jsonl
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.weight_memory import FreshMemory
from moeflow.cli.bench.output import result_options
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError
from moeflow.core.offload_config import DeviceConfig, EmulatedDeviceConfig, EmulatedSpeeds
from moeflow.engine.compute_setup import set_up
from moeflow.engine.offload.offloaded_model import OffloadedModel
from moeflow.engine.runner_loading import make_allocator
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.loading import load_model
from moeflow.pipeline.devices.emulated_device import EmulatedDevice
from moeflow.planner.choices.offload_plan import OffloadOverrides, costs_of, plan_offload
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.task_costs import WORKS, decode_shape
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.gpu_check.pipelines.timed_devices import Spans, TimedDevice, at_once, merged, timed_devices
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.records import recorder

SHARING = "cgopipe+host"
PIPELINES = (SHARING, "cgopipe", "fastdecode", "flexgen-cpu-attention", "flexgen", "zero-inference")
WARM_UP_STEPS = {SHARING: 3}  # it hears how fast the link is, then the host, then settles; others: 1
CONTEXTS = (32, 128)  # tokens, at least and at most
DISTURBED = 0.1  # late work, as a share of emulated time: such a turn is made again
MAX_TRIES = 2
SHARES = ("link_idle", "device_idle", "overlap", "late_share")
SEED = 0


@dataclass
class Turn:
    """What a pipeline's turn came to."""

    seconds: float
    tokens: list[list[int]]  # of each step, one a request
    link_idle: float
    device_idle: float
    overlap: float  # of both works, as a share of the shorter one
    late_share: float


class Runner:
    """One pipeline over the model, and the requests that fit."""

    def __init__(
        self,
        name: str,
        model: CausalLM,
        config: EngineConfig,
        kv: KVStorage,
        contexts: Sequence[int],
        *,
        has_streams: bool = False,
    ) -> None:
        assert config.offload is not None
        self.pipeline = name
        self.num_resident = config.offload.num_resident_experts
        self.micro_batch = config.offload.micro_batch_tokens
        with timed_devices(has_streams=has_streams):
            self.model = OffloadedModel(model, config)
        self.contexts = list(contexts)
        self._kv = kv
        self._blocks_per_request = config.scheduler.num_blocks // len(contexts)
        if config.offload.num_resident_kv_layers:
            for layer in range(model.config.num_layers):
                assert self.model._kv._resident is not None
                own = self.model._kv._resident.layer(layer).storage  # as if these requests had been prefilled there
                own.copy_(kv.layer(layer).storage[: own.numel()])

    @torch.inference_mode()
    def turn(self, num_steps: int) -> Turn:
        """Decode some tokens of each request, from the same place on each time."""
        late_s, charged_s = self._late_and_charged_s
        earlier = [len(spans) for spans in self._spans]
        start = time.perf_counter()
        tokens = [[(7 * number) % self.model.config.vocab_size for number in range(len(self.contexts))]]
        for step in range(num_steps):
            hidden = self.model(torch.tensor(tokens[-1]), self._context(step))
            tokens.append(self.model.logits(hidden).argmax(dim=1).tolist())
        seconds = time.perf_counter() - start
        late_s, charged_s = self._late_and_charged_s[0] - late_s, self._late_and_charged_s[1] - charged_s
        copied, computed = (merged(spans[count:]) for spans, count in zip(self._spans, earlier, strict=True))
        busy_s = [sum(end - begin for begin, end in spans) for spans in (copied, computed)]
        return Turn(
            seconds=seconds,
            tokens=tokens[1:],
            link_idle=1 - busy_s[0] / seconds,
            device_idle=1 - busy_s[1] / seconds,
            overlap=at_once(copied, computed) / min(busy_s) if min(busy_s) else 0.0,
            late_share=late_s / charged_s if charged_s else 0.0,
        )

    @property
    def _late_and_charged_s(self) -> tuple[float, float]:
        device = self.model.device
        return device.late_and_charged_s if isinstance(device, EmulatedDevice) else (0.0, 0.0)

    def _context(self, step: int) -> ForwardContext:
        starts = [context + step for context in self.contexts]
        size = self._blocks_per_request
        metadata = AttentionMetadata.build(
            starts=starts,
            num_tokens=[1] * len(starts),
            block_ids=[range(number * size, (number + 1) * size) for number in range(len(starts))],
            block_size=self._kv.block_size,
            device="cpu",
        )
        return ForwardContext(torch.tensor(starts), metadata, self._kv)

    @property
    def _spans(self) -> tuple[Spans, Spans]:
        """Return when copies to the device and computing took place so far."""
        device = self.model.device
        assert isinstance(device, TimedDevice)
        return device.spans()


def made_up_kv(model: CausalLM, config: EngineConfig) -> KVStorage:
    """Return keys and values that belong to no text."""
    shape = model.config
    kv = KVStorage(
        layers=range(shape.num_layers),
        num_blocks=config.scheduler.num_blocks,
        block_size=config.scheduler.block_size,
        num_kv_heads=shape.attention.num_kv_heads,
        head_dim=shape.attention.head_dim,
        dtype=torch.bfloat16,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(SEED)
    kv.layers[0].storage.view(torch.bfloat16).normal_(generator=generator)
    for layer in kv.layers[1:]:
        layer.storage.copy_(kv.layers[0].storage)
    return kv


def load(config: EngineConfig) -> CausalLM:
    """Load the model as the engine does."""
    set_up(config)
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        return load_model(checkpoint, make_allocator(config, FreshMemory()), num_threads=config.num_threads)


def max_requests(costs: ModelCosts, host_bytes: float, context: int) -> int:
    """Return how many requests fit on the host, in addition to all weights and two staged layers."""
    staged = 2 * costs.experts_bytes / costs.shape.num_layers
    return int((host_bytes - costs.model_bytes - staged) / (context * costs.kv_bytes))


def balanced_device(
    balance: float, device: DeviceConfig, config: EngineConfig, costs: ModelCosts, micro_batch: int
) -> EmulatedDeviceConfig:
    """Return an emulated device whose processor and host each take a share of the link's time in CGOPipe.

    Their times grow with tokens: the device is bound by operations, as with many requests.
    """
    limits = config.scheduler
    overrides = OffloadOverrides(device=device, pipeline="cgopipe", micro_batch_tokens=micro_batch)
    offload = plan_offload(overrides, costs, dataclasses.replace(limits, max_num_batched_tokens=limits.max_num_seqs))
    assert isinstance(device, EmulatedDeviceConfig), "a GPU has speeds of its own"
    shape, number = costs.shape, -(-limits.max_num_seqs // micro_batch)
    streamed = 1 - offload.num_resident_experts / shape.routing.num_experts
    layer_s = balance * costs.experts_bytes * streamed / device.speeds.link / shape.num_layers
    at = decode_shape(costs, micro_batch, statistics.mean(CONTEXTS))
    works = {op: WORKS[op][1](at) for op in ("pre_attention", "post_attention", "cpu_attention")}
    host_bytes = number * sum(work.num_bytes for work in works.pop("cpu_attention"))
    device_flops = number * sum(work.num_flops for each in works.values() for work in each)
    speeds = EmulatedSpeeds(
        link=device.speeds.link, device_flops=device_flops / layer_s, host_bytes=host_bytes / layer_s
    )
    return dataclasses.replace(device, speeds=speeds)


def fitted(
    case: tuple[str, int], costs: ModelCosts, config: EngineConfig, device: DeviceConfig
) -> tuple[EngineConfig, int]:
    """Return a configuration for as many of the requests as fit the device, and how many these are."""
    name, micro_batch = case
    num_requests = config.scheduler.max_num_seqs
    blocks_per_request = config.scheduler.num_blocks // num_requests
    overrides = OffloadOverrides(
        device=device,
        pipeline="cgopipe" if name == SHARING else name,
        micro_batch_tokens=num_requests if name == "zero-inference" else micro_batch,
    )
    while True:
        limits = dataclasses.replace(
            config.scheduler,
            max_num_seqs=num_requests,
            max_num_batched_tokens=num_requests,
            num_blocks=num_requests * blocks_per_request,
        )
        try:
            offload = plan_offload(overrides, costs, limits)
        except CapacityError:
            if num_requests == 1:
                raise
            num_requests = num_requests * 15 // 16
        else:
            offload = dataclasses.replace(offload, num_hosted_experts=None if name == SHARING else 0)
            return dataclasses.replace(config, scheduler=limits, offload=offload), num_requests


@click.command()
@click.argument("model")
@click.option("--quantize", type=click.Choice(["int8", "int4"]))
@click.option("--device", default="emulated:640MiB,0.15,t4", show_default=True)
@click.option("--balance", type=float, help="Device and host each take so much of the link's time in CGOPipe.")
@click.option("--streams", "has_streams", is_flag=True, help="The emulated device launches work on streams.")
@click.option("--device-share", type=float, help="Its memory as a share of the model, instead of its own size.")
@click.option("--host-share", type=float, help="Main memory likewise: so many requests, in place of --requests.")
@click.option("--pipeline", "pipelines", multiple=True, default=PIPELINES, show_default=True, metavar="NAME[:SIZE]")
@click.option(
    "--requests", "num_requests", default=704, show_default=True, help="Decoded concurrently, where they fit."
)
@click.option("--micro-batch", "micro_batches", multiple=True, type=int, default=(32,), show_default=True)
@click.option("--threads", type=int, help="Of the host; one where other programs run.")
@click.option("--steps", default=2, show_default=True, help="Tokens of each request in a turn.")
@click.option("--rounds", default=3, show_default=True)
@result_options
def main(
    model: str,
    quantize: str | None,
    device: str,
    balance: float | None,
    has_streams: bool,
    device_share: float | None,
    host_share: float | None,
    pipelines: tuple[str, ...],
    num_requests: int,
    micro_batches: tuple[int, ...],
    threads: int | None,
    steps: int,
    rounds: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure, and print a table and records."""
    context = -(-(CONTEXTS[1] + steps) // 16) * 16
    config = resolve(
        Settings(
            model=model,
            quantize=quantize,
            device=device,
            resident_experts=0.0,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=context,
            kv_dtype="bfloat16",
            num_threads=threads,
        )
    ).config
    assert config.offload is not None, "the device is smaller than the model"
    click.echo(f"loading {model}", err=True)
    loaded, smaller = load(config), config.offload.device
    is_gpu, is_rounded = config.offload.cuda is not None, config.offload.computes_in_torch
    costs = costs_of(loaded.config, config)
    if device_share is not None:
        smaller = dataclasses.replace(smaller, capacity_bytes=int(device_share * costs.model_bytes))
    if host_share is not None:
        num_requests = max_requests(costs, host_share * costs.model_bytes, context)
    num_blocks = num_requests * context // config.scheduler.block_size
    limits = dataclasses.replace(config.scheduler, max_num_seqs=num_requests, num_blocks=num_blocks)
    config = dataclasses.replace(config, scheduler=limits)
    kv = made_up_kv(loaded, config)
    lengths = torch.randint(*CONTEXTS, (num_requests,), generator=torch.Generator().manual_seed(SEED)).tolist()
    if balance is not None:
        smaller = balanced_device(balance, smaller, config, costs, micro_batches[0])
    chosen = list(cases(pipelines, micro_batches))
    caps = {"device_share": device_share, "host_share": host_share, "model_bytes": int(costs.model_bytes)}
    about = {"model": Path(model).name, "weights": config.weight_format, "device": device, **caps, "steps": steps}
    about |= {"balance": balance, "has_streams": has_streams}
    to = recorder("pipelines", out, as_json=as_json)
    first: Turn | None = None
    for together in [[case] for case in chosen] if is_gpu else [chosen]:
        with ExitStack() as stack:
            runners = []
            for case in together:
                fitting, count = fitted(case, costs, config, smaller)
                runners.append(Runner(case[0], loaded, fitting, kv, lengths[:count], has_streams=has_streams))
                stack.callback(runners[-1].model.close)
            turns = take_turns(runners, steps, rounds)
        for runner, mine in zip(runners, turns, strict=True):
            first = first or mine[0]
            share = equal_tokens(mine, first)
            assert is_rounded or share == 1, f"{runner.pipeline} gave other tokens than {chosen[0][0]}"
            result = {**about, **summary(runner, mine, steps), "equal_tokens": round(share, 4)}
            to.add(result, seed=SEED, threads=config.num_threads)
        del runner
        give_back(runners)
    to.show(lambda records: [table(records)])


def cases(pipelines: Sequence[str], micro_batches: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield what to compare; zero-inference has one micro-batch anyway."""
    for text in pipelines:
        name, _, own = text.partition(":")
        sizes = (int(own),) if own else micro_batches
        yield from ((name, size) for size in (sizes[:1] if name == "zero-inference" else sizes))


def take_turns(runners: Sequence[Runner], num_steps: int, num_rounds: int) -> list[list[Turn]]:
    """Return each runner's turns without the first, which warmed it up."""
    turns: dict[int, list[Turn]] = {which: [] for which in range(len(runners))}
    for number, which in interleaved(list(turns), num_rounds + 1):
        steps = num_steps if number else WARM_UP_STEPS.get(runners[which].pipeline, 1)
        turns[which] += undisturbed(runners[which], steps, f"round {number}")[: number and 1]
    return list(turns.values())


def undisturbed(runner: Runner, num_steps: int, name: str) -> list[Turn]:
    """Return the first turn that kept the emulated times, or the one that was least late."""
    turns: list[Turn] = []
    for _ in range(MAX_TRIES):
        turns.append(turn := runner.turn(num_steps))
        click.echo(
            f"{name}: {runner.pipeline} ({runner.micro_batch}) {turn.seconds:.2f} s, link idle {turn.link_idle:.0%}, "
            f"device idle {turn.device_idle:.0%}, overlap {turn.overlap:.0%}, late {turn.late_share:.1%}",
            err=True,
        )
        if turn.late_share < DISTURBED:
            break
    return sorted(turns, key=lambda turn: turn.late_share)


def give_back(runners: list[Runner]) -> None:
    """Free a GPU's memory for the next pipelines."""
    runners.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def equal_tokens(turns: Sequence[Turn], other: Turn) -> float:
    """Return the share of tokens that are those of another turn, over the requests of both."""
    steps = [pair for turn in turns for pair in zip(turn.tokens, other.tokens, strict=True)]
    return statistics.mean(one == another for pair in steps for one, another in zip(*pair, strict=False))


def summary(runner: Runner, turns: Sequence[Turn], num_steps: int) -> Record:
    """Return a runner's figures: medians over its turns, and all speeds."""
    speeds = [len(runner.contexts) * num_steps / turn.seconds for turn in turns]
    return {
        "pipeline": runner.pipeline,
        "requests": len(runner.contexts),
        "micro_batch": min(runner.micro_batch, len(runner.contexts)),
        "resident_experts": runner.num_resident,
        "hosted_experts": round(runner.model._share.num_hosted / runner.model.config.num_layers, 2),  # of a layer
        "device_bytes_used": runner.model.device.memory.used_bytes,
        "tokens_per_s": [round(speed, 2) for speed in speeds],
        **{name: round(statistics.median(getattr(turn, name) for turn in turns), 4) for name in SHARES},
    }


def table(records: Sequence[Record]) -> Table:
    """Return the comparison of runs of one model on one device, for people."""
    first = records[0]
    title = f"{first['model']}, {first['weights']}, {first['device']}"
    if first.get("device_share") is not None:
        title += f" with {first['device_share']:.0%} of the model's bytes"
    best = max(statistics.median(r["tokens_per_s"]) for r in records if not r["pipeline"].startswith("cgopipe"))
    rows = []
    for record in records:
        speeds = record["tokens_per_s"]
        rows.append(
            (
                record["pipeline"],
                str(record["requests"]),
                str(record["micro_batch"]),
                str(record.get("resident_experts", 0)),
                str(record.get("hosted_experts", 0)),
                spread_text(speeds),
                f"{statistics.median(speeds) / best:.2f}",
                *(f"{record[name]:.1%}" if name in record else "" for name in SHARES),
            )
        )
    columns = (
        "pipeline",
        "requests",
        "micro-batch",
        "stay",
        "on host",
        "tokens/s",
        "of best other",
        "link idle",
        "device idle",
        "overlap",
        "late",
    )
    return Table(title, columns, tuple(rows))


if __name__ == "__main__":
    run_study(main)
