"""The commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from moeflow.bench.engine_speed import SpeedCase
from moeflow.bench.records import read
from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli.bench.output import result_options
from moeflow.cli.bench.output import show as show_table
from moeflow.core.units import format_bytes
from moeflow.experts.cache.policies import POLICIES
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.hardware.host import host_resources
from moeflow.train.builtin import builtin_source
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycling import upcycle
from studies.harness.command import run_study
from studies.harness.records import publish, recorder
from studies.offload.contestants import FOLDER, Built, Model, within
from studies.offload.device_table import device_groups, device_table
from studies.offload.device_ways import CPU, Device, Measurement, ways
from studies.offload.llama_bench import PROGRAM as LLAMA_BENCH
from studies.offload.llama_bench import LlamaBench, num_cpu_layers
from studies.offload.measure import Run
from studies.offload.prompts import WORKLOADS, cut_prompts, default_texts
from studies.offload.tables import offload_table
from studies.peers.commands.options import folder_option, say
from studies.peers.contestants import SHARED
from studies.peers.environments import IK_LLAMA_NATIVE, LLAMA
from studies.peers.model import QUANTIZATIONS, write_gguf
from studies.peers.turns import weight_files

RECIPE = UpcycleRecipe(num_experts=64, top_k=2, perturbation=0.05)
DEVICE_CASES = {case.name: case for case in (SpeedCase(1, 32, 16), SpeedCase(16, 32, 16), SpeedCase(1, 512, 0))}
weights_option = click.option(
    "--weights", type=click.Choice(tuple(SHARED)), default="bfloat16", show_default=True, help="Their format."
)


@click.group()
def main() -> None:
    """Measure a model larger than memory, or than a GPU."""


@main.command("model")
@folder_option
@weights_option
def write_model(folder: Path, weights: str) -> None:
    """Make the model from the built-in model's source, 64 experts a layer, as a GGUF file, and pack that.

    Existing files are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = Model(folder, weights)
    if not model.file.exists():
        if not (folder / FOLDER).exists():
            click.echo(f"making {folder / FOLDER}")
            upcycle(builtin_source(), folder / FOLDER, RECIPE)
        click.echo(f"writing {model.file}")
        unfinished = model.file.with_suffix(".unfinished")
        quantization = QUANTIZATIONS[SHARED[weights]]
        write_gguf(folder / FOLDER, unfinished, quantization, tokenizer_file=builtin_source())
        unfinished.rename(model.file)
    click.echo(f"packing {model.packed}")
    pack(str(model.file), model.packed, cache_dir=None, dtype=model.dtype)


@main.command()
@folder_option
@weights_option
@click.option("--bigmoe", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its program, built.")
@click.option("--bigmoe-options", default="", help="Additional arguments of that program.")
@click.option("--share", "shares", type=float, multiple=True, default=(0.5, 0.25), show_default=True)
@click.option("--workload", type=click.Choice(WORKLOADS), default=WORKLOADS[0], show_default=True)
@click.option("--text", "texts", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True)
@click.option("--policy", "policies", type=click.Choice(tuple(POLICIES)), multiple=True, help="Measure it as well.")
@click.option("--without", "left_out", multiple=True, help="Leave out contestants whose name contains this.")
@click.option("--prompt", "prompt_len", type=click.IntRange(1), default=512, show_default=True, help="Tokens.")
@click.option("--tokens", "num_new", type=click.IntRange(2), default=64, show_default=True, help="After each prompt.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Prompts after the first.")
@click.option("--threads", type=click.IntRange(1), help="Threads of each engine; default: one a core.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed cuts the same prompts.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the record to this file.")
def measure(
    folder: Path,
    weights: str,
    shares: tuple[float, ...],
    policies: tuple[str, ...],
    left_out: tuple[str, ...],
    threads: int | None,
    seed: int,
    out: Path | None,
    **asked: Any,
) -> None:
    """Measure prefill and decode of one request at a time within shares of the model's size.

    Everyone computes the same tokens: those that the model chooses where all of it is in memory.
    """
    threads = threads or host_resources().num_cores
    files = asked["texts"] or default_texts()
    count, length = asked["rounds"] + 1, asked["prompt_len"]
    model = Model(folder, weights)
    built = Built(asked["bigmoe"], tuple(asked["bigmoe_options"].split()))
    prompts = cut_prompts(model.file, files, asked["workload"], count=count, length=length, seed=seed)
    run = Run(model, prompts, asked["num_new"], threads, seed, say)
    answers, resident = run.reference()
    budgets = []
    for share in shares:
        budget_bytes = int(share * model.num_bytes)
        say(f"within {format_bytes(budget_bytes)}:")
        contestants = [each for each in within(budget_bytes, model, policies, built) if not _is_in(each.name, left_out)]
        rows = run.within(budget_bytes, contestants, answers)
        budgets.append({"share": share, "bytes": budget_bytes, "rows": rows})
    publish(
        "offload",
        offload_table,
        out,
        seed=seed,
        threads=threads,
        format=weights,
        workload=asked["workload"],
        texts=[file.name for file in files],
        model_bytes=model.num_bytes,
        peer_versions={**{each.package: each.version(folder) for each in (LLAMA, IK_LLAMA_NATIVE)}, **built.versions()},
        prompt_len=length,
        new_tokens=asked["num_new"],
        resident=resident,
        budgets=budgets,
    )


@main.command("device")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@folder_option
@click.option("--device", "device_text", required=True, help="cuda:8GiB, or emulated:8GiB,12,t4 without a GPU.")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="As moeflow's option.")
@click.option("--baseline", default=CPU, show_default=True, help="The way that others are compared with.")
@click.option("--without", "left_out", multiple=True, help="Leave out ways whose name contains this.")
@click.option("--case", "cases", type=click.Choice(tuple(DEVICE_CASES)), multiple=True, help="Only this; default: all.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Measurements of each case.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: one a core.")
@click.option("--llama-bench", "program", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The model for llama.cpp.")
@click.option("--n-cpu-moe", type=click.IntRange(0), help="As llama.cpp's option; default: the least that fits.")
@result_options
def measure_device(
    model: Path,
    folder: Path,
    device_text: str,
    quantize: str | None,
    baseline: str,
    left_out: tuple[str, ...],
    cases: tuple[str, ...],
    rounds: int,
    threads: int | None,
    as_json: bool,
    out: Path | None,
    **llama: Any,
) -> None:
    """Compare the ways to run MODEL on a GPU that is smaller: hybrid, streamed, on the CPU, and llama.cpp's.

    llama.cpp is measured where `llama-bench` is on PATH, or is named by --llama-bench, and there is a GGUF file.
    """
    device, threads = Device.of(device_text), threads or host_resources().num_cores
    kept = recorder("offload_device", out, as_json=as_json)
    open_checkpoint(model).close()
    run = Measurement([DEVICE_CASES[name] for name in cases or DEVICE_CASES], threads, rounds, 0, folder / "logs", say)
    about = {"model": model.name, "device": device_text, "quantize": quantize, "baseline": baseline}
    about["model_bytes"] = sum(file.stat().st_size for file in weight_files(model))
    shared = {} if quantize is None else {"quantize": quantize}
    for way in ways(model, device, shared):
        if not _is_in(way.name, left_out):
            kept.add({**about, **run.of_ours(way)}, seed=run.seed, threads=threads)
    bench = _llama_bench(model, device, **llama)
    if bench is not None:
        kept.add({**about, **run.of_llama(bench)}, seed=run.seed, threads=threads)
    kept.show(lambda records: [device_table(records)])


def _llama_bench(
    model: Path, device: Device, program: Path | None, gguf: Path | None, n_cpu_moe: int | None
) -> LlamaBench | None:
    """Return llama.cpp's benchmark; None where it, or a file for it, is missing."""
    found = program or shutil.which(LLAMA_BENCH)
    file = gguf or (model if model.suffix == ".gguf" else None)
    if found is None or file is None:
        return None
    fitting = None
    if device.gpu:
        fitting = num_cpu_layers(file, device.capacity_bytes) if n_cpu_moe is None else n_cpu_moe
    return LlamaBench(Path(found), file, fitting)


@main.command("show")
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
def show_files(files: tuple[Path, ...]) -> None:
    """Print the tables of records measured before."""
    for record in read(files):
        if record["kind"] == "offload":
            show_table(offload_table(record))
    for found in device_groups(read(files)):
        show_table(device_table(found))


def _is_in(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


if __name__ == "__main__":
    run_study(main)
