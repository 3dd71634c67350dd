"""Are experts in another machine's memory faster than the disk here? Two networks on one machine, a link between.

    python -m studies.remote_experts FOLDER [--rate 10gbit] [--memory 1700MiB] [--rounds 4] [--out FILE]

Needs root, for network namespaces and `tc`. Head and lender have a core and a thread each, the baseline the same core
and thread as the head: the same model and memory limit, from disk alone, alternately within one run. The model is a
Mixtral of random numbers (its experts are mostly zeros, which takes kernels as long), about 3 GB in bfloat16, written
to FOLDER first; tokens are drawn at temperature 1, and routers choose by token, about evenly. Experts are read past the
page cache. The lower bound is the data that must cross the link, plus a round trip a layer.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import parse_bytes
from moeflow.engine.engine import Engine
from moeflow.parallel.tcp.cluster_token import ensure_token
from moeflow.planner.model_files import shipped_models
from moeflow.planner.planning import plan_for_start
from moeflow.settings.settings import Settings
from studies.harness.children import Children
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.hollow_model import write_hollow_mixtral

HEAD, LENDER, PORT = "10.213.78.1", "10.213.78.2", 9300
NUM_LAYERS: Final = 16
NARROW: Final = 4
EMBEDDING_SCALE: Final = 64.0
PROMPT: Final = 256  # tokens of the prompt whose prefill is measured
NUM_NEW: Final = 10  # tokens that are decoded
BATCHES: Final = (1, 8)
WARM_UPS: Final = 1
LENT: Final = "4GiB"


def write_model(folder: Path) -> Path:
    """Write the model unless it is there; return its folder."""
    model = folder / "model"
    if not (model / "config.json").exists():
        config = json.loads(shipped_models()["mixtral-8x7b"].read_text(encoding="utf-8"))
        folder.mkdir(parents=True, exist_ok=True)
        bare = folder / "config.json"
        bare.write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}), encoding="utf-8")
        write_hollow_mixtral(bare, model, NARROW)
        enlarge_embeddings(model / "outer.safetensors")
    return model


def enlarge_embeddings(file: Path) -> None:
    """Have routers choose by token: as they are written, attention hides which one it is, and choices hardly change."""
    size = int.from_bytes(file.open("rb").read(8), "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    info = header["model.embed_tokens.weight"]
    start, end = info["data_offsets"]
    values = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
    table = values[8 + size + start : 8 + size + end]
    table.copy_((table.clone().view(torch.bfloat16) * EMBEDDING_SCALE).view(torch.uint8))


@contextlib.contextmanager
def two_networks(rate: str) -> Iterator[tuple[str, str]]:
    """Yield two network namespaces with a link of this rate between them, both ways."""
    names = ("moeflow-head", "moeflow-lender")
    with contextlib.ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HEAD, LENDER), strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            limit = ("tbf", "rate", rate, "burst", "1mbit" if rate == "1gbit" else "10mbit", "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", *limit)
        yield names


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def lender(namespace: str, folder: Path, core: int) -> Iterator[None]:
    """Run `moeflow lend`."""
    command = [*_on_core(namespace, core), sys.executable, "-m", "moeflow.cli.main", "lend", "--threads", "1"]
    command += ["--listen", f"{LENDER}:{PORT}", "--memory", LENT, "--cluster-token-file", str(folder / "token")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            process.stderr.readline()
            yield
        finally:
            process.kill()


def _on_core(namespace: str, core: int) -> list[str]:
    return ["ip", "netns", "exec", namespace, "taskset", "-c", str(core)]


class Head:
    """An engine in a process of its own."""

    def __init__(self, namespace: str, settings: dict[str, Any]) -> None:
        """Load one."""
        self._engine = Children()
        command = [*_on_core(namespace, 0), sys.executable, "-m", "studies.remote_experts", "--worker"]
        self._engine.start([*command, json.dumps(settings)])
        self._engine.answer(0)

    def ask(self, **question: Any) -> dict[str, Any]:
        """Have it answer prompts, or tell its counters."""
        (found,) = self._engine.ask(question)
        return dict(found)

    def end(self) -> None:
        """End it."""
        self._engine.close()


def work(settings: dict[str, Any]) -> None:
    """Be such a process."""
    sizes = {name: parse_bytes(settings.pop(name)) for name in ("memory_bytes", "kv_cache_bytes")}
    paths = {name: Path(settings.pop(name)) for name in ("cache_dir", "cluster_token_file")}
    engine = Engine.load(plan_for_start(Settings(**settings, **sizes, **paths)).config)
    print(json.dumps({"config": str(engine.config.experts)}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        before = engine.stats()
        answer = answers(engine, **question) if question else {}
        after = engine.stats()
        answer |= {
            "num_remote": after.experts_remote,
            "disk_bytes": after.expert_demand_bytes_total - before.expert_demand_bytes_total,
            "remote_bytes": after.remote_bytes_total - before.remote_bytes_total,
            "remote_pairs": after.remote_pairs_total - before.remote_pairs_total,
            "wait_s": after.remote_wait_s_total - before.remote_wait_s_total,
            "stall_s": after.expert_stall_s_total - before.expert_stall_s_total,
            "lenders": [lender.state for lender in after.lenders],
        }
        print(json.dumps(answer), flush=True)


def answers(engine: Engine, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """Answer some prompts; return tokens and seconds of prefill and of decoding, the first tokens left out."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=1.0, max_tokens=num_new, ignore_eos=True)
        engine.submit(Submission(f"{number}", prompt, sampling, seed=sum(prompt)))
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(len(prompts))}
    start_s, first_s = time.perf_counter(), 0.0
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        if not first_s and all(tokens.values()):
            first_s = time.perf_counter()
    return {"tokens": list(tokens.values()), "prefill_s": first_s - start_s, "decode_s": time.perf_counter() - first_s}


def measure(disk: Head, remote: Head, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return each case's time in each round, alternately from disk and with a lender."""
    chance = random.Random(seed)
    rows = []
    cases = [("prefill", 1, PROMPT, 1), *((f"decode at {batch}", batch, 8, NUM_NEW) for batch in BATCHES)]
    for name, batch, length, num_new in cases:
        row: dict[str, Any] = {"case": name, "disk": [], "remote": [], "tokens": batch * (num_new - 1) or length}
        for number in range(rounds + WARM_UPS):
            prompts = [[chance.randrange(2, 30000) for _ in range(length)] for _ in range(batch)]
            found = {"disk": disk.ask(prompts=prompts, num_new=num_new)}
            found["remote"] = remote.ask(prompts=prompts, num_new=num_new)
            if found["disk"]["tokens"] != found["remote"]["tokens"]:
                raise click.ClickException(f"{name}: tokens differ")
            if number >= WARM_UPS:
                for who, answer in found.items():
                    del answer["tokens"]
                    answer["seconds"] = answer["prefill_s" if num_new == 1 else "decode_s"]
                    row[who].append(answer)
        rows.append(row)
        click.echo(f"{name}: {ratio(row):.2f}x", err=True)
    return rows


def wait_until_placed(head: Head) -> float:
    """Return the seconds until a lender has got no more experts for a while."""
    start_s, last, since_s = time.perf_counter(), -1, time.perf_counter()
    while time.perf_counter() - since_s < 3:
        now = head.ask()["num_remote"]
        if now != last:
            last, since_s = now, time.perf_counter()
        time.sleep(0.2)
    if last <= 0:
        raise click.ClickException("the lender has got no experts")
    return since_s - start_s


def ratio(row: dict[str, Any]) -> float:
    """Return how many times as fast the lender makes a case, in the median of rounds."""
    return statistics.median(ratios(row))


def ratios(row: dict[str, Any]) -> list[float]:
    """Return that of each round."""
    pairs = zip(row["disk"], row["remote"], strict=True)
    return [disk["seconds"] / remote["seconds"] for disk, remote in pairs]


def table(record: dict[str, Any]) -> Table:
    """Return the figures of one link."""
    columns = (
        "",
        "disk tokens/s",
        "with lender tokens/s",
        "ratio",
        "from",
        "to",
        "disk read GB/s",
        "link MB",
        "waited",
    )
    found = []
    for row in record["cases"]:
        seconds = {who: statistics.median(it["seconds"] for it in row[who]) for who in ("disk", "remote")}
        read = statistics.median(it["disk_bytes"] / it["seconds"] for it in row["disk"])
        sent = statistics.median(it["remote_bytes"] for it in row["remote"])
        waited = statistics.median(it["wait_s"] / it["seconds"] for it in row["remote"])
        speeds = [f"{row['tokens'] / seconds[who]:.3g}" for who in ("disk", "remote")]
        spread = [f"{ratio(row):.2f}", f"{min(ratios(row)):.2f}", f"{max(ratios(row)):.2f}"]
        found.append((row["case"], *speeds, *spread, f"{read / 1e9:.2f}", f"{sent / 1e6:.1f}", f"{waited:.0%}"))
    number, placed_s = record["num_remote"], record["placed_s"]
    notes = (
        f"{number} of {NUM_LAYERS * 8} experts at the lender, placed in {placed_s:.0f} s; --memory {record['memory']}",
    )
    return Table(f"Experts from disk, and at a lender, {record['link']}", columns, tuple(found), notes)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--rate", "rates", multiple=True, default=("1gbit", "10gbit"), help="Of the link, as tc writes it.")
@click.option("--memory", default="1700MiB", show_default=True, help="Limit of the head.")
@click.option("--rounds", default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--worker", help="Internal: be an engine with these settings.")
@result_options
def main(
    folder: Path | None,
    rates: Sequence[str],
    memory: str,
    rounds: int,
    seed: int,
    worker: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure on links of these rates."""
    if worker is not None:
        work(json.loads(worker))
        return
    assert folder is not None
    model = write_model(folder.absolute())
    ensure_token(folder / "token")
    base = {"model": str(model), "memory_bytes": memory, "kv_cache_bytes": "64MiB", "num_threads": 1}
    base |= {"cache_dir": str(folder.absolute()), "cluster_token_file": str(folder.absolute() / "token")}
    for rate in rates:
        with two_networks(rate) as (here, there), lender(there, folder.absolute(), core=1):
            heads: list[Head] = []
            try:
                heads.append(Head(here, base))
                heads.append(Head(here, base | {"remote_experts": f"{LENDER}:{PORT}"}))
                placed_s = wait_until_placed(heads[1])
                num_remote = heads[1].ask()["num_remote"]
                rows = measure(*heads, rounds, seed)
            finally:
                for head in heads:
                    head.end()
        measured = {"link": rate, "memory": memory, "cases": rows, "num_remote": num_remote, "placed_s": placed_s}
        publish("remote_experts", table, out, as_json=as_json, seed=seed, threads=1, **measured)


if __name__ == "__main__":
    run_study(main)
