"""Two machines, and a model larger than the memory of one: which use of the second machine is fastest?

    python -m studies.two_machines FOLDER --shape coarse --rate 1gbit --disk 500

Needs root. A machine is a network namespace, a core with one thread, and a control group that limits its
disk. A link of the given rate joins both. The arms answer the same prompts alternately:

- disk: one machine with `--memory`; experts that do not fit come from disk
- lent: the same, and the other machine lends as much memory (`moeflow lend`), in each pass without a trial
- ranks, stages: the other machine has a copy of the checkpoint and the same `--memory`, and computes, too
- whole: one machine with memory for the whole model

Models are Mixtrals of random numbers. Tokens are drawn at temperature 1, and routers choose by token, about evenly.
Experts are read past the page cache (O_DIRECT). All arms must give equal tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import torch

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.parallel_config import RankLinks
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import parse_bytes
from moeflow.engine.engine import Engine
from moeflow.engine.ranks.linked_rank import compute_linked
from moeflow.experts.remote.remote_experts import RemoteExperts
from moeflow.parallel.tcp.cluster_token import ensure_token
from moeflow.planner.model_files import shipped_models
from moeflow.planner.planning import plan_for_start
from moeflow.settings.settings import Settings
from studies.harness.children import Children
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.ray_nodes import ip
from studies.harness.records import publish
from studies.hollow_model import write_hollow_mixtral

ADDRESSES: Final = ("10.213.79.1", "10.213.79.2")
PORTS: Final = {"lent": 9300, "ranks": 9301, "stages": 9302}
RANKS: Final[dict[str, dict[str, Any]]] = {  # layouts are named, since each machine plans by itself
    "ranks": {"num_ranks": 2, "expert_layout": "expert", "attention_layout": "replicated"},
    "stages": {"stages": "2"},
}
SECRET: Final = b"of the ranks of this study"
PINNED: Final = ("taskset", "-c")  # and a core
NARROW: Final = 4  # divides Mixtral's widths
SHAPES: Final = {  # of models of 3 to 4 GB in bfloat16
    "coarse": {"num_hidden_layers": 16},
    "fine": {
        "num_hidden_layers": 12,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 768 * NARROW,
    },
}
EMBEDDING_SCALE: Final = 64.0
CASES: Final = {  # requests, tokens of each prompt, tokens that each draws
    "decode 1": (1, 8, 8),
    "decode 16": (16, 8, 5),
    "prompt 512": (1, 512, 1),
    "warm-up": (1, 8, 48),
}
WARM_UP: Final = "warm-up"
PLACED_S: Final = 3  # without a further expert
BLKIO: Final = Path("/sys/fs/cgroup/blkio")


def write_model(folder: Path, shape: str) -> Path:
    """Write the model unless it is there; return its folder."""
    model = folder / shape
    if not (model / "config.json").exists():
        config = json.loads(shipped_models()["mixtral-8x7b"].read_text(encoding="utf-8"))
        folder.mkdir(parents=True, exist_ok=True)
        bare = folder / f"{shape}.json"
        bare.write_text(json.dumps(config | SHAPES[shape]), encoding="utf-8")
        write_hollow_mixtral(bare, model, NARROW)
        enlarge_embeddings(model / "outer.safetensors")
    return model


def enlarge_embeddings(file: Path) -> None:
    """Have routers choose by token: as they are written, attention hides which one it is, and choices hardly change."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        start, end = json.loads(stream.read(size))["model.embed_tokens.weight"]["data_offsets"]
    values = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
    table = values[8 + size + start : 8 + size + end]
    table.copy_((table.clone().view(torch.bfloat16) * EMBEDDING_SCALE).view(torch.uint8))


class Machine:
    """A place to run processes: the words before a command that start it there."""

    def __init__(self, number: int, namespace: str, prefix: Sequence[str] = ()) -> None:
        self.address, self.namespace = ADDRESSES[number], namespace
        self.prefix = (*prefix, "ip", "netns", "exec", namespace, *PINNED, str(number))

    def moeflow(self, undo: contextlib.ExitStack, *arguments: str) -> None:
        """Run a command until `undo`; it tells nothing."""
        command = [*self.prefix, sys.executable, "-m", "moeflow.cli.main", *arguments, "--threads", "1"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        undo.callback(process.wait)
        undo.callback(process.kill)


@dataclass(frozen=True)
class Disk:
    """The limit of a disk."""

    device: str  # major:minor
    mb_per_s: int


@contextlib.contextmanager
def two_machines(disk: Disk | None) -> Iterator[list[Machine]]:
    """Yield two machines, with a link between them; `disk` limits each."""
    names = [f"moeflow-{os.getpid()}-{number}" for number in range(2)]
    machines = []
    with contextlib.ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            group = BLKIO / name
            group.mkdir()
            undo.callback(_remove, group)
            if disk is not None:
                limit = f"{disk.device} {disk.mb_per_s * 10**6}"
                (group / "blkio.throttle.read_bps_device").write_text(limit)
            prefix = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
            machines.append(Machine(number, name, prefix))
        yield machines


def limit_link(machines: Sequence[Machine], rate: str) -> None:
    """Give the link this rate, both ways."""
    limit = ("tbf", "rate", rate, "burst", "1mbit" if rate == "1gbit" else "10mbit", "latency", "50ms")
    for machine in machines:
        ip("netns", "exec", machine.namespace, "tc", "qdisc", "replace", "dev", "cable", "root", *limit)


def _remove(group: Path) -> None:
    for _ in range(100):  # a process that has just ended may still count
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


class Arm:
    """One engine."""

    def __init__(self, prefix: Sequence[str], settings: dict[str, Any]) -> None:
        """Load it, behind the words of a prefix."""
        self._engine = Children()
        self._engine.start([*prefix, *worker_command(settings)])
        self._engine.answer(0)

    def ask(self, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        """Have it answer prompts; return tokens and seconds."""
        (found,) = self._engine.ask({"prompts": prompts, "num_new": num_new})
        return dict(found)

    def end(self) -> None:
        """End it."""
        self._engine.close()


class AlwaysOn:
    """Stands for the trial that decides whether passes use lenders."""

    is_on = True

    def end_pass(self, *_: float) -> None:
        """Ignore how long a pass took."""


def answers(engine: Engine, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """Answer prompts; return tokens, and the seconds of the case: of the prompts, or of decoding without them."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=1.0, max_tokens=num_new, ignore_eos=True)
        engine.submit(Submission(f"{number}", prompt, sampling, seed=sum(prompt)))
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(len(prompts))}
    before = engine.stats()
    start_s, first_s = time.perf_counter(), 0.0
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        if not first_s and all(tokens.values()):
            first_s = time.perf_counter()
    end_s, after = time.perf_counter(), engine.stats()
    return {
        "tokens": list(tokens.values()),
        "seconds": 0.0 if not prompts else first_s - start_s if num_new == 1 else end_s - first_s,
        "all_s": end_s - start_s,
        "disk_bytes": after.expert_demand_bytes_total - before.expert_demand_bytes_total,
        "remote_bytes": after.remote_bytes_total - before.remote_bytes_total,
        "num_remote": after.experts_remote,
    }


def question(random_: random.Random, case: str) -> dict[str, Any]:
    """Return random prompts of a case."""
    batch, length, num_new = CASES[case]
    return {"prompts": [[random_.randrange(2, 30000) for _ in range(length)] for _ in range(batch)], "num_new": num_new}


def measure(arms: dict[str, Arm], rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return each case's seconds in each round, alternately of all arms. Raises: ClickException."""
    chance = random.Random(seed)
    rows = []
    for case in (case for case in CASES if case != WARM_UP):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        asked: list[dict[str, Any]] = [question(chance, case) for _ in range(rounds + 1)]
        tokens: dict[int, Any] = {}
        for number, name in interleaved(list(arms), rounds + 1):
            answer = arms[name].ask(**asked[number])
            if tokens.setdefault(number, answer["tokens"]) != answer.pop("tokens"):
                raise click.ClickException(f"{case}: tokens of {name} differ")
            if number:
                found[name].append(answer)
        rows.append({"case": case, "arms": found})
        middles = (f"{name} {statistics.median(it['seconds'] for it in row):.3g} s" for name, row in found.items())
        click.echo(f"{case}: {', '.join(middles)}", err=True)
    return rows


def table(record: Record) -> Table:
    """Return speeds of the first arm, and how many times as fast the others are: the median and range of rounds."""
    first, *others = record["cases"][0]["arms"]
    columns = ("", f"{first} tokens/s", *others)
    speed_of_disk = f"{record['disk_mb_per_s']} MB/s" if record["disk_mb_per_s"] else "as it is"
    title = f"{record['shape']} experts, --memory {record['memory']}, link {record['link']}, disk {speed_of_disk}"
    found = []
    for row in record["cases"]:
        batch, length, num_new = CASES[row["case"]]
        base = [it["seconds"] for it in row["arms"][first]]
        speed = (length if num_new == 1 else batch * (num_new - 1)) / statistics.median(base)
        line = [row["case"], f"{speed:.3g}"]
        for name in others:
            seconds = (it["seconds"] for it in row["arms"][name])
            ratios = [mine / other for mine, other in zip(base, seconds, strict=True)]
            line.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        found.append(tuple(line))
    return Table(title, columns, tuple(found), (f"times as fast as {first}: median of rounds, from and to",))


def worker_command(settings: dict[str, Any]) -> list[str]:
    """Return the command of an engine with these settings."""
    return [sys.executable, "-m", "studies.two_machines", ".", "--worker", json.dumps(settings)]


def linked(config: EngineConfig, listen_ranks: str, rank: int) -> EngineConfig:
    """Return the configuration of a rank of both machines, at the port of `listen_ranks` (HOST:PORT)."""
    assert config.parallel is not None
    port = int(listen_ranks.rpartition(":")[2])
    links = RankLinks(rank=rank, addresses=tuple((address, port) for address in ADDRESSES), secret=SECRET)
    return replace(config, parallel=replace(config.parallel, links=links))


def work(settings: str, rank: int) -> None:
    """Be an engine with these settings, or its rank on the other machine."""
    given = json.loads(settings)
    sizes = {name: parse_bytes(given.pop(name)) for name in ("memory_bytes", "kv_cache_bytes") if name in given}
    paths = {name: Path(given.pop(name)) for name in ("cache_dir", "cluster_token_file")}
    config = plan_for_start(Settings(**given, **sizes, **paths)).config
    if "remote_experts" in given:
        RemoteExperts._trial_of = lambda *_: AlwaysOn()  # type: ignore[assignment,method-assign,return-value]
    if "listen_ranks" in given:
        config = linked(config, given["listen_ranks"], rank)
    if rank:
        compute_linked(config)
        return
    engine = Engine.load(config)
    print("true", flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(answers(engine, **json.loads(line))), flush=True)
    finally:
        engine.close()


def common(folder: Path, shape: str) -> dict[str, Any]:
    """Return settings of all arms. Speeds that an earlier run measured are forgotten: its disk may be another."""
    folder = folder.absolute()
    model = write_model(folder, shape)
    ensure_token(folder / "token")
    shutil.rmtree(folder / "machines", ignore_errors=True)
    return {
        "model": str(model),
        "kv_cache_bytes": "64MiB",
        "cache_dir": str(folder),
        "cluster_token_file": str(folder / "token"),
        "num_threads": 1,
        "prefix_caching": False,
    }


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="coarse", show_default=True)
@click.option("--rate", "rates", multiple=True, default=("10gbit", "1gbit"), help="Of the link, as tc writes it.")
@click.option("--disk", "disk_mb_per_s", type=int, help="Limit of each machine's disk, in MB/s.")
@click.option("--device", default="254:0", show_default=True, help="The disk that has the limit.")
@click.option("--memory", default="2100MiB", show_default=True, help="Limit of each machine.")
@click.option("--lent", "lent_memory", help="Memory of the lender, if it is not --memory.")
@click.option("--arm", "wanted", multiple=True, default=("disk", "lent", "ranks", "stages", "whole"))
@click.option("--rounds", default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--worker", help="Internal: be an engine with these settings.")
@click.option("--rank", default=0, help="Internal: of the worker.")
@result_options
def main(
    folder: Path,
    shape: str,
    rates: Sequence[str],
    disk_mb_per_s: int | None,
    device: str,
    memory: str,
    lent_memory: str | None,
    wanted: Sequence[str],
    rounds: int,
    seed: int,
    worker: str | None,
    rank: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure uses of a second machine."""
    if worker is not None:
        work(worker, rank)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    base = common(folder, shape)
    disk = None if disk_mb_per_s is None else Disk(device, disk_mb_per_s)
    measured = {"shape": shape, "disk_mb_per_s": disk_mb_per_s, "memory": memory, "lent": lent_memory}
    with two_machines(disk) as both, contextlib.ExitStack() as undo:
        arms = {name: start_arm(name, base, memory, lent_memory, both, undo) for name in wanted}
        for name in wanted:
            arms[name].ask(**question(random.Random(seed), WARM_UP))
        if "lent" in arms:
            wait_until_placed(arms["lent"])
        for rate in rates:
            limit_link(both, rate)
            rows = measure(arms, rounds, seed)
            found = measured | {"link": rate, "cases": rows}
            publish("two_machines", table, out, as_json=as_json, seed=seed, threads=1, **found)


def wait_until_placed(arm: Arm) -> None:
    """Wait until the lender has got no more experts for a while. Raises: ClickException if it has none."""
    last, same = -1, 0
    while same < PLACED_S:
        time.sleep(1)
        now = arm.ask([], 1)["num_remote"]
        last, same = now, same + 1 if now == last else 0
    if last <= 0:
        raise click.ClickException("the lender has got no experts")


def start_arm(
    name: str,
    base: dict[str, Any],
    memory: str,
    lent_memory: str | None,
    both: Sequence[Machine],
    undo: contextlib.ExitStack,
) -> Arm:
    """Start one use of the machines, which ends with `undo`."""
    here, there = both
    token = ("--cluster-token-file", base["cluster_token_file"])
    own = {} if name == "whole" else {"memory_bytes": memory}
    if name == "lent":
        address = f"{there.address}:{PORTS[name]}"
        there.moeflow(undo, "lend", "--listen", address, "--memory", lent_memory or memory, *token)
        time.sleep(4)
        own |= {"remote_experts": address}
    elif name in RANKS:
        address = f"{here.address}:{PORTS[name]}"
        own |= {"listen_ranks": address, "is_served": True} | RANKS[name]
        other = subprocess.Popen([*there.prefix, *worker_command(base | own), "--rank", "1"])
        undo.callback(other.wait)
        undo.callback(other.kill)
    arm = Arm(here.prefix, base | own)
    undo.callback(arm.end)
    return arm


if __name__ == "__main__":
    run_study(main)
