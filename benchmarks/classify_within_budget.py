"""Claim: a classifier needs few of its experts in memory at once, and predicting them before a text's pass pays.

Texts are classified one after another, by the same model over slots for a share of its experts, in several ways, a few
texts at a time in turns. All ways must give the same probabilities, to the bit. "layers" reads all experts of a layer
that are not there, as systems do that know nothing of routing; "on demand" reads what routers choose; "predicted" also
reads ahead what the network of `moeflow train predictor` says (SiDA, 2310.18859).

    moeflow train classifier --data train.tsv --out reviews
    moeflow train predictor reviews --data train.tsv
    python benchmarks/classify_within_budget.py reviews --data dev.tsv --share 10 --share 25 --share 50
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import click
from torch import Tensor

from moeflow.bench.records import Record, make_record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import keep, result_options, show
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig
from moeflow.engine.engine import Engine
from moeflow.engine.messages import NO_TOKENS, Submission
from moeflow.engine.model_runner import ModelRunner
from moeflow.engine.pooling_choice import classification
from moeflow.engine.runner_loading import load_runner
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.experts.cached_experts import CachedExperts, _Work
from moeflow.models.expert_predictor.saved import is_saved, predictor_folder
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.planner.settings import Settings

WAYS: Final = {  # policy of eviction, predictor
    "layers": ("fifo", "none"),
    "on demand, fifo": ("fifo", "none"),
    "on demand": ("next-use", "none"),
    "predicted": ("next-use", "sida"),
}
TURN: Final = 10  # texts that one way classifies before another does
WARM_UP: Final = 40  # texts that are not counted


class WholeLayers(CachedExperts):
    """Has all experts of its layer come, whatever routers choose."""

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `CachedExperts.compute`."""
        work = _Work(self.pool, hidden, topk_ids, topk_weights, residual)
        work.experts = list(range(self.pool.cache.num_experts))
        work._num_experts = len(work.experts)
        self._compute_here(work, hidden, topk_ids)
        return work.sums()


class Classifying:
    """An engine that classifies texts one by one."""

    def __init__(self, config: EngineConfig, *, reads_layers: bool = False) -> None:
        self.runner: ModelRunner = load_runner(config)
        self.engine = Engine.over(config, self.runner)
        self.seconds: list[float] = []  # of each turn
        self.answers: list[bytes | None] = []
        if reads_layers:
            for _, block in self.runner.model.moe_blocks():
                assert isinstance(block.weights, CachedExperts)
                block.weights.__class__ = WholeLayers

    def run(self, texts: Sequence[list[int]]) -> None:
        """Classify some texts, one in a pass."""
        began_s = time.perf_counter()
        pooling = classification(self.engine.model)
        for number, text in enumerate(texts, len(self.answers)):
            self.engine.submit(Submission(str(number), text, NO_TOKENS, seed=0, pooling=pooling))
        while self.engine.has_work:
            self.answers += [output.embedding for output in self.engine.step()]
        self.seconds.append(time.perf_counter() - began_s)

    def close(self) -> None:
        self.engine.close()


def measure(configs: dict[str, EngineConfig], texts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Return what each way took. Raises: AssertionError if answers differ."""
    with ExitStack() as stack:
        ways = {
            name: stack.enter_context(closing(Classifying(config, reads_layers=name == "layers")))
            for name, config in configs.items()
        }
        for way in ways.values():
            way.run(texts[:WARM_UP])
            way.seconds.clear()
        before = {name: way.engine.stats() for name, way in ways.items()}
        for turn, start in enumerate(range(WARM_UP, len(texts), TURN)):
            order = list(ways.values())
            for way in order[turn % len(order) :] + order[: turn % len(order)]:
                way.run(texts[start : start + TURN])
        first, *others = (way.answers for way in ways.values())
        assert all(answers == first for answers in others), "probabilities differ"
        rows = []
        for name, way in ways.items():
            now, then = way.engine.stats(), before[name]
            read = sum(
                getattr(now, f"expert_{kind}_bytes_total") - getattr(then, f"expert_{kind}_bytes_total")
                for kind in ("demand", "prefetched")
            )
            rows.append(
                {
                    "way": name,
                    "texts_per_s": (len(texts) - WARM_UP) / sum(way.seconds),
                    "turn_s": way.seconds,
                    "read_bytes_per_text": read / (len(texts) - WARM_UP),
                    "stall_s_per_text": (now.expert_stall_s_total - then.expert_stall_s_total) / (len(texts) - WARM_UP),
                }
            )
        return rows


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Lines of text and label.")
@click.option("--share", "shares", type=int, multiple=True, default=(10, 25, 50), help="Percent of experts in slots.")
@click.option("--texts", "num_texts", default=240, show_default=True)
@click.option("--threads", type=int)
@result_options
def main(
    model: Path,
    data: Path,
    shares: Sequence[int],
    num_texts: int,
    threads: int | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Classify the texts of DATA with MODEL, all of it in memory and within shares of its experts."""
    tokenizer = Tokenizer.load(model)
    lines = data.read_text(encoding="utf-8").splitlines()[:num_texts]
    texts = [tokenizer.encode(line.rpartition("\t")[0]) for line in lines]
    settings = Settings(model=str(model), num_threads=threads, max_num_seqs=1, max_model_len=1024)
    resident = dataclasses.replace(resolve(settings).config, packed_file="")
    index = pack(str(model), None, cache_dir=Path.home() / ".cache" / "moeflow")
    ways = {name: way for name, way in WAYS.items() if way[1] != "sida" or is_saved(predictor_folder(model))}
    rows = []
    for share in shares:
        num_slots = max(index.spec.num_slabs * share // 100, 4)
        over_slots = {
            name: dataclasses.replace(
                resident,
                experts=ExpertSlotsConfig(
                    packed_weights_file=str(index.path),
                    num_slots=num_slots,
                    slab_bytes=index.spec.slab_bytes,
                    policy=policy,
                    predictor=predictor,
                ),
            )
            for name, (policy, predictor) in ways.items()
        }
        found = measure({"resident": resident, **over_slots}, texts)
        rows += [{"share": share, "num_slots": num_slots, **row} for row in found]
    record = make_record(
        "classify_within_budget",
        ["python", "benchmarks/classify_within_budget.py", *sys.argv[1:]],
        seed=0,
        threads=resident.num_threads,
        model=model.name,
        num_experts=index.spec.num_experts,
        num_slabs=index.spec.num_slabs,
        slab_bytes=index.spec.slab_bytes,
        tokens_per_text=statistics.fmean(map(len, texts)),
        rows=rows,
    )
    keep(record, out, as_json=as_json)
    if not as_json:
        show(table(record))


def table(record: Record) -> Table:
    """Return a record as a table."""
    rows, slab_bytes = [], record["slab_bytes"]
    for row in record["rows"]:
        layers = next(
            (it["texts_per_s"] for it in record["rows"] if it["share"] == row["share"] and it["way"] == "layers"), None
        )
        is_resident = row["way"] == "resident"
        slots = record["num_slabs"] if is_resident else row["num_slots"]
        rows.append(
            (
                f"{row['share']}%, {row['way']}",
                f"{slots * slab_bytes / 2**20:.0f}",
                f"{row['texts_per_s']:.1f}",
                f"{row['texts_per_s'] / layers:.2f}" if layers else "",
                f"{row['read_bytes_per_text'] / 2**20:.1f}",
                f"{row['stall_s_per_text'] * 1e3:.1f}",
            )
        )
    model = f"{record['model']}, {record['num_experts']} experts a layer"
    title = f"Texts of {record['tokens_per_text']:.0f} tokens, one in a pass: {model}"
    columns = ("experts in memory", "MiB", "texts/s", "x layers", "MiB read a text", "ms waited")
    return Table(title, columns, tuple(rows), ("The same probabilities to the bit in all rows.",))


if __name__ == "__main__":
    main()
