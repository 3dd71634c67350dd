"""Ranks that share experts: which layout is fastest, and do halves of a pass that wait by turns help?

    python -m studies.rank_schedules FOLDER
    python -m studies.rank_schedules FOLDER --link 1gbit --arm index,synchronous --arm index,asynchronous

Arms are engines of two ranks, with a core and a thread each. They answer the same prompts alternately:

- index: Whole experts lie in blocks by index.
- load: moeflow moves whole experts by load.
- replicas: As load, with two replicas a layer.
- sliced: Each rank has a slice of every expert.
- synchronous: Ranks compute all tokens of a pass at once.
- asynchronous: Ranks compute a pass in two halves (`--rank-schedule asynchronous`).

The link is the memory of one machine, or a link of this rate between two network namespaces (needs root). With --scale,
ranks sleep as long as T4s would compute a model of GPT-MoE's sizes, which needs no idle machine. The model is
a random one of the family dots1. Biases let its routers prefer a quarter of the experts: the first ones in even layers,
the last ones in odd layers. So with experts by index each rank is the slower one by turns. Idle is the share of the
time that the first rank waits for the other, with copies. All arms must give equal tokens.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.engine.engine import Engine
from moeflow.engine.ranks.linked_rank import compute_linked
from moeflow.planner.planning import plan_for_start
from moeflow.settings.settings import Settings
from studies.asynchronous.case import Case
from studies.harness.children import Children
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.records import publish
from studies.sleeping_ranks import sleep_as
from studies.two_machines import PINNED, Machine, answers, limit_link, linked, two_machines
from tests.tiny_mixtral import write_byte_tokenizer

MEMORY: Final = "memory"  # the link of ranks on one machine
UNLIMITED: Final = "unlimited"  # as fast as the namespaces of one machine
FIRST_PORT: Final = 9310
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "index": {"expert_layout": "expert", "expert_placement": "index"},
    "load": {"expert_layout": "expert", "expert_placement": "load"},
    "replicas": {"expert_layout": "expert", "expert_placement": "load", "num_redundant_experts": 2},
    "sliced": {"expert_layout": "sliced"},
}
SCHEDULES: Final = ("synchronous", "asynchronous")
ARMS: Final = tuple(f"{layout},{schedule}" for layout in LAYOUTS for schedule in SCHEDULES)
CASES: Final = {  # requests, tokens of each prompt, tokens that each draws
    "prompt 512": (1, 512, 1),
    "prompt 2048": (1, 2048, 1),
    "decode 16": (16, 8, 5),
}
WARM_UP: Final = (1, 8, 220)  # whose passes let experts move
VOCABULARY: Final = 16000
EXPERTS: Final = 32


def write_model(folder: Path, bias: float, *, is_thin: bool) -> Path:
    """Write the model unless it is there, with little to compute if it is thin; return its folder."""
    model = folder / f"{'thin' if is_thin else 'wide'}-{bias:g}"
    if (model / "config.json").exists():
        return model
    torch.manual_seed(0)
    config = CONFIG_MAPPING["dots1"](
        vocab_size=VOCABULARY,
        hidden_size=128 if is_thin else 512,
        num_hidden_layers=8,
        num_attention_heads=2 if is_thin else 8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        moe_intermediate_size=32 if is_thin else 768,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=4,
        first_k_dense_replace=0,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    made = AutoModelForCausalLM.from_config(config)
    for number, layer in enumerate(made.model.layers):
        hot = slice(EXPERTS // 4) if number % 2 == 0 else slice(-EXPERTS // 4, None)
        layer.mlp.gate.e_score_correction_bias[hot] += bias
    made.to(torch.bfloat16).save_pretrained(model)
    write_byte_tokenizer(model)
    return model


def work(settings: str, rank: int, scale: float) -> None:
    """Be the first rank of an engine with these settings, or the other one on a machine of its own."""
    given = json.loads(settings)
    if scale:
        sleep_as(Case(scale=scale), 2)
    config = plan_for_start(Settings(**given | {"cache_dir": Path(given["cache_dir"])})).config
    assert config.parallel is not None
    if config.parallel.is_spread:
        config = linked(config, given["listen_ranks"], rank)
    if rank:
        compute_linked(config)
        return
    engine = Engine.load(config)
    clock = engine._runner._upkeep.group.clock  # type: ignore[attr-defined]
    print("true", flush=True)
    try:
        for line in sys.stdin:
            before_s = clock.waited_s
            found = answers(engine, **json.loads(line))
            print(json.dumps(found | {"idle": (clock.waited_s - before_s) / found["all_s"]}), flush=True)
    finally:
        engine.close()


def start_arm(
    name: str, base: dict[str, Any], both: Sequence[Machine], scale: float, undo: contextlib.ExitStack
) -> Children:
    """Start an engine, on one machine or on `both`, which ends with `undo`."""
    layout, schedule = name.split(",")
    settings = base | LAYOUTS[layout] | {"num_ranks": 2, "rank_schedule": schedule}
    if both:
        settings |= {"listen_ranks": f"{both[0].address}:{FIRST_PORT + ARMS.index(name)}", "is_served": True}
    worker = [sys.executable, "-m", "studies.rank_schedules", ".", "--worker", json.dumps(settings)]
    worker += ["--scale", str(scale), "--rank"]
    prefixes = [machine.prefix[: -len(PINNED) - 1 if scale else None] for machine in both]  # sleeping needs no core
    if both:
        other = subprocess.Popen([*prefixes[1], *worker, "1"])
        undo.callback(other.wait)
        undo.callback(other.kill)
    engine = Children()
    undo.callback(engine.close)
    engine.start([*(prefixes[0] if both else ()), *worker, "0"])
    engine.answer(0)
    return engine


def question(chance: random.Random, case: tuple[int, int, int]) -> dict[str, Any]:
    """Return random prompts of a case."""
    batch, length, num_new = case
    prompts = [[chance.randrange(2, VOCABULARY) for _ in range(length)] for _ in range(batch)]
    return {"prompts": prompts, "num_new": num_new}


def measure(arms: dict[str, Children], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield each case's seconds and idle shares in each round, alternately of all arms. Raises: ClickException."""
    chance = random.Random(seed)
    for engine in arms.values():
        engine.ask(question(random.Random(seed), WARM_UP))
    for case, sizes in CASES.items():
        asked = [question(chance, sizes) for _ in range(rounds + 1)]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        tokens: dict[int, Any] = {}
        for number, name in interleaved(list(arms), rounds + 1):
            (answer,) = arms[name].ask(asked[number])
            if tokens.setdefault(number, answer["tokens"]) != answer["tokens"]:
                raise click.ClickException(f"{case}: tokens of {name} differ")
            if number:
                found[name].append({key: answer[key] for key in ("seconds", "idle")})
        yield {"case": case, "arms": found}


def table(record: Record) -> Table:
    """Return speeds of the first arm, how many times as fast the others are, and idle shares."""
    first = next(iter(record["cases"][0]["arms"]))
    found = []
    for row in record["cases"]:
        batch, length, num_new = CASES[row["case"]]
        base = [it["seconds"] for it in row["arms"][first]]
        for name, runs in row["arms"].items():
            ratios = [mine / other["seconds"] for mine, other in zip(base, runs, strict=True)]
            seconds = statistics.median(it["seconds"] for it in runs)
            tokens = batch * (length if num_new == 1 else num_new - 1)
            found.append(
                (
                    row["case"],
                    name.replace(",", ", "),
                    f"{tokens / seconds:.0f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                    f"{statistics.median(it['idle'] for it in runs):.0%}",
                )
            )
    title = f"Two ranks, link {record['link']}, bias of hot experts {record['bias']:g}"
    if record["scale"]:
        title += f", sleeping {record['scale']:g} times as long as a T4 computes"
    columns = ("", "ranks", "tokens/s", f"times as fast as {first.replace(',', ', ')}", "idle")
    return Table(title, columns, tuple(found), ("median of rounds, from and to",))


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--link", "links", multiple=True, default=(MEMORY,), help="memory, or a rate as tc writes it.")
@click.option("--arm", "wanted", multiple=True, type=click.Choice(ARMS), default=ARMS)
@click.option("--bias", default=0.2, show_default=True, help="Of the hot experts.")
@click.option("--scale", default=0.0, help="Sleep for a multiple of the computing time of a T4; not with memory.")
@click.option("--rounds", default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--worker", help="Internal: be an engine with these settings.")
@click.option("--rank", default=0, help="Internal: which of its ranks.")
@result_options
def main(
    folder: Path,
    links: Sequence[str],
    wanted: Sequence[str],
    bias: float,
    scale: float,
    rounds: int,
    seed: int,
    worker: str | None,
    rank: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure layouts and schedules of ranks."""
    if worker is not None:
        work(worker, rank, scale)
        return
    if scale and MEMORY in links:
        raise click.ClickException("ranks sleep on two machines only: give a --link")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = folder.absolute()
    base = {
        "model": str(write_model(folder, bias, is_thin=scale > 0)),
        "kv_cache_bytes": 1 << 26,
        "cache_dir": str(folder),
        "num_threads": 1,
        "prefix_caching": False,
        "max_num_batched_tokens": 2048,
    }
    for link in links:
        with contextlib.ExitStack() as undo:
            both = [] if link == MEMORY else undo.enter_context(two_machines(None))
            arms = {name: start_arm(name, base, both, scale, undo) for name in wanted}
            if link not in (MEMORY, UNLIMITED):
                limit_link(both, link)
            cases = list(measure(arms, rounds, seed))
        publish(
            "rank_schedules",
            table,
            out,
            as_json=as_json,
            seed=seed,
            threads=1,
            **{"link": link, "bias": bias, "scale": scale, "cases": cases},
        )


if __name__ == "__main__":
    run_study(main)
