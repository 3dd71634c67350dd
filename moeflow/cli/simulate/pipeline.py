"""`moeflow simulate pipeline`: a batch job on any machine, by the pipelines that stream weights, on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from moeflow.bench.tables import Table
from moeflow.cli import lazy
from moeflow.cli.bench.output import show
from moeflow.cli.params import NEW_FILE, NEW_PICTURE
from moeflow.cli.progress import bar
from moeflow.cli.simulate.common import SHIPPED, check_devices, choose_formats, described_options, read_shape
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.plan import Workload
from moeflow.core.units import format_bytes
from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.offloading import DEVICE_TO_HOST, HOST, HOST_TO_DEVICE, HOST_TO_PINNED
from moeflow.pipeline.runtime.dot import write_dot
from moeflow.pipeline.runtime.perfetto import write_perfetto
from moeflow.pipeline.task import COMPUTE
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.simulator.pipeline_run import PipelineRun, make_policy
from moeflow.planner.simulator.time_line import kv_buffer, peak, weight_buffer

LANES = {
    COMPUTE: "device",
    HOST: "host",
    HOST_TO_DEVICE: "to device",
    DEVICE_TO_HOST: "back",
    HOST_TO_PINNED: "to pinned",
}
TIERS = {RAM: "memory", DEVICE: "device memory"}

EPILOG = f"""\b
Examples:
  moeflow simulate pipeline --machine paper-s1 --model mixtral-8x7b \\
      --batch-size 936 --micro-batch 36
  moeflow simulate pipeline --machine l4 --model mixtral-8x7b \\
      --batch-size 300 --micro-batch 20 --picture lanes.png
  moeflow simulate pipeline --machine my.json --model ./config.json \\
      --batch-size 64 --micro-batch 8 \\
      --prompt-len 512 --gen-len 64 --pipeline cgopipe --trace cgopipe.json

cgopipe streams weights in pages between the hidden states that attention on the host sends back (MoE-Lightning);
fastdecode does the same with whole layers; flexgen-cpu-attention attends on the host while the device waits; flexgen
fetches keys and values to attend on the device; zero-inference keeps them there and goes layer by layer. All use the
same kernels.
{SHIPPED}"""


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@described_options
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Sequences that decode concurrently (N).")
@click.option("--micro-batch", type=click.IntRange(1), required=True, help="Of these, computed at once (mu).")
@click.option("--prompt-len", type=click.IntRange(1), default=256, help="Tokens of each prompt.")
@click.option("--gen-len", type=click.IntRange(1), default=64, help="Tokens generated for each.")
@click.option(
    "--pipeline",
    "names",
    type=click.Choice(list(PIPELINES)),
    multiple=True,
    default=tuple(PIPELINES),
    help="May be given often.",
)
@click.option(
    "--resident",
    type=click.FloatRange(0, 100),
    help="Percent of the layers' weights that stay on the device.  [default: as many as fit]",
    show_default=False,
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of a table.")
@click.option("--trace", type=NEW_FILE, help="Write a step for ui.perfetto.dev.")
@click.option("--graph", type=NEW_FILE, help="Write a step's tasks for GraphViz.")
@click.option("--picture", type=NEW_PICTURE, help="Draw two layers into this PNG.")
def pipeline(
    machine: str,
    model: str,
    batch_size: int,
    micro_batch: int,
    prompt_len: int,
    gen_len: int,
    names: tuple[str, ...],
    resident: float | None,
    weights: str | None,
    devices: int,
    as_json: bool,
    trace: Path | None,
    graph: Path | None,
    picture: Path | None,
) -> None:
    """Predict a batch job's speed, what idles, and what memory it takes, by each pipeline that streams weights.

    All sequences have one length and begin at once. Prompts are computed on the device, then steps are decoded.
    """
    names = tuple(dict.fromkeys(names))
    if (trace or graph) and len(names) > 1:
        raise ConfigError("--trace and --graph are of one pipeline; choose it with --pipeline")
    if micro_batch > batch_size:
        raise ConfigError(
            f"--micro-batch {micro_batch} is more than there are sequences (--batch-size {batch_size}): "
            f"take {batch_size} or fewer"
        )
    host, shape = load_machine(machine), read_shape(model)
    check_devices(host, shape, devices)
    costs = ModelCosts(shape, choose_formats(host, weights))
    workload = Workload(prompt_len=prompt_len, gen_len=gen_len, max_prompt_len=prompt_len)
    runs: dict[str, PipelineRun] = {}
    with bar(len(names)) as shown:
        for name in names:
            shown.say(name)
            policy = make_policy(
                PIPELINES[name],
                host,
                costs,
                workload,
                batch_size=batch_size,
                micro_batch=micro_batch,
                resident_share=None if resident is None else resident / 100,
                num_devices=devices,
            )
            runs[name] = PipelineRun(
                pipeline=PIPELINES[name], machine=host, costs=costs, workload=workload, policy=policy
            )
            _ = runs[name].tokens_per_s
            shown.advance()
    if as_json:
        for run in runs.values():
            click.echo(json.dumps(to_json(run), allow_nan=False))
    else:
        for table in make_tables(runs, model):
            show(table)
    write_pictures(runs, trace, graph, picture)


def make_tables(runs: Mapping[str, PipelineRun], model: str) -> list[Table]:
    """Return the pipelines' speeds, what idles, and what memory they need; the fastest first."""
    one = next(iter(runs.values()))
    fastest = sorted(runs.items(), key=lambda item: -item[1].tokens_per_s)
    policy, workload = one.policy, one.workload
    title = (
        f"{model} on {one.machine.name}: {policy.batch_size} sequences in {policy.num_micro_batches} micro-batches of "
        f"{policy.micro_batch}, {workload.prompt_len} + {workload.gen_len} tokens, {one.costs.formats.matrices}"
    )
    speeds = [
        (name, f"{run.tokens_per_s:.2f}", f"{run.prefill_s:.1f}", f"{run.middle_step.seconds:.3f}")
        for name, run in fastest
    ]
    note = f"Predicted, not measured; {one.machine.caution}."
    return [
        Table(title, ("pipeline", "tokens/s", "prefill s", "step s"), tuple(speeds)),
        _idle_table(dict(fastest)),
        _memory_table(dict(fastest), note),
    ]


def _idle_table(runs: Mapping[str, PipelineRun]) -> Table:
    lanes = [lane for lane in LANES if any(run.middle_step.use(lane).busy_s for run in runs.values())]
    rows = [
        (
            name,
            *(f"{run.middle_step.use(lane).idle_share:.0%}" if lane in run.middle_step.lanes else "" for lane in lanes),
        )
        for name, run in runs.items()
    ]
    return Table("Idle while a step is decoded", ("pipeline", *(LANES[lane] for lane in lanes)), tuple(rows))


def _memory_table(runs: Mapping[str, PipelineRun], note: str) -> Table:
    one = next(iter(runs.values()))
    rows = [
        (
            name,
            f"{run.policy.weights_on_device:.0%}",
            *(format_bytes(run.memory[tier]) + ("" if fits else " (!)") for tier, fits in run.fits.items()),
        )
        for name, run in runs.items()
    ]
    columns = ("pipeline", "weights that stay on the device", *(TIERS.get(tier, tier) for tier in one.fits))
    notes = [note]
    short = [tier for tier in one.fits if not all(run.fits[tier] for run in runs.values())]
    if short:
        have = ", ".join(
            f"{TIERS.get(tier, tier)} {format_bytes(one.machine.level(tier).capacity_bytes)}" for tier in short
        )
        notes.append(f"(!): more than there is ({have}). Take smaller micro-batches, or fewer sequences.")
    return Table("Memory needed", columns, tuple(rows), tuple(notes))


def to_json(run: PipelineRun) -> dict[str, Any]:
    """Return a job as one object."""
    line, policy = run.middle_step, run.policy
    return {
        "pipeline": run.pipeline.name,
        "machine": run.machine.name,
        "tokens_per_s": run.tokens_per_s,
        "prefill_s": run.prefill_s,
        "decode_s": run.decode_s,
        "step_s": line.seconds,
        "batch_size": policy.batch_size,
        "micro_batch": policy.micro_batch,
        "weights_on_device": policy.weights_on_device,
        "prompt_len": run.workload.prompt_len,
        "gen_len": run.workload.gen_len,
        "idle_share": {lane: line.use(lane).idle_share for lane in line.lanes},
        "busy_s": {lane: line.use(lane).busy_s for lane in line.lanes},
        "moved_bytes": {lane: line.use(lane).num_bytes for lane in line.lanes},
        "memory_bytes": dict(run.memory),
        "fits": run.fits,
        "weight_buffer_peak_bytes": peak(weight_buffer(line, is_warm=True)),
        "kv_buffer_peak_bytes": peak(kv_buffer(line)),
    }


def write_pictures(
    runs: Mapping[str, PipelineRun], trace: Path | None, graph: Path | None, picture: Path | None
) -> None:
    """Write the requested outputs, for the step in the middle of the job."""
    run = next(iter(runs.values()))
    num_layers = run.costs.shape.num_layers
    if trace is not None:
        write_perfetto(run.middle_step.to_trace(), trace)
    if graph is not None:
        tasks = run.pipeline.make_tasks(num_layers, run.policy.num_micro_batches, is_warm=True, wraps=True)
        write_dot(tasks, graph)
    if picture is not None:
        middle = num_layers // 2
        layers = (max(middle - 1, 0), middle + 1)
        lazy.plot_time_lines({name: one.middle_step for name, one in runs.items()}, layers, picture)
