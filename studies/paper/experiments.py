"""Tables and figures of the four papers, the command that shows ours, and whether it agrees.

The list has the numbered results that the papers' claims rest on. Diagrams of well-known parts are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from moeflow.bench.tables import Table

Status = Literal["reproduced", "partly", "not", "cannot be shown here"]

EXPERTFLOW: Final = "ExpertFlow"
LIGHTNING: Final = "MoE-Lightning"
SLICED: Final = "Sliced experts"
SIDA: Final = "SiDA"
PAPERS: Final = (EXPERTFLOW, LIGHTNING, SLICED, SIDA)
STATUSES: Final[tuple[Status, ...]] = ("reproduced", "partly", "not", "cannot be shown here")

_LIGHTNING_STUDY: Final = "python -m studies.paper moe-lightning"
_SIDA_STUDY: Final = "python -m studies.paper sida"
_SLICED_STUDY: Final = "python -m studies.paper sliced-experts"
_THESIS: Final = "python -m studies.paper expertflow"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A table or figure of a paper."""

    paper: str
    number: str
    subject: str
    command: str
    status: Status
    cause: str  # of the status, in one short sentence; of a reproduced figure, the evidence


EXPERIMENTS: Final = (
    Experiment(
        EXPERTFLOW,
        "figure 3.1",
        "path of a request in seven steps",
        "moeflow serve MODEL --replicas 2 --grpc-port 50051",
        "reproduced",
        "Requests come over HTTP and gRPC; tests follow each step.",
    ),
    Experiment(
        EXPERTFLOW,
        "figure 3.2",
        "synchronous expert-parallel schedule and its idle time",
        "python -m studies.parallel",
        "reproduced",
        "Ranks measure the idle time of each section.",
    ),
    Experiment(
        EXPERTFLOW,
        "figure 3.3",
        "asynchronous expert-parallel schedule and its idle time",
        "python -m studies.asynchronous --layers 4",
        "partly",
        "512 tokens a batch: 1.14 to 1.20 times as fast, idle 13% to 16%, not 38%; slower with few tokens.",
    ),
    Experiment(
        EXPERTFLOW,
        "figures 3.7 and 3.8",
        "time line of the tasks of each resource",
        "moeflow generate --trace trace.json -p Once",
        "reproduced",
        "ui.perfetto.dev shows the trace; waits are tasks of their own.",
    ),
    Experiment(
        EXPERTFLOW,
        "table 6.1",
        "requests a second on four T4s, and with padded batches",
        _THESIS,
        "reproduced",
        "Simulated 1% to 12% below; 1.92 of the published 1.95 times padded batches, measured 1.7 on a small model.",
    ),
    Experiment(
        EXPERTFLOW,
        "table 6.2",
        "generated tokens a second on four T4s, and with padded batches",
        _THESIS,
        "reproduced",
        "As table 6.1.",
    ),
    Experiment(
        EXPERTFLOW,
        "table 6.3",
        "latency of requests on four T4s, and with padded batches",
        _THESIS,
        "partly",
        "Averages are simulated 1% to 12% higher, with a fitted wait of 5.6 s that nothing published explains.",
    ),
    *(
        Experiment(
            EXPERTFLOW,
            f"figure 6.{number}",
            f"latency over a request's length at {rate} requests/s",
            _THESIS,
            "partly",
            "Latency follows length more closely than with padded batches, as published; the text has no curves.",
        )
        for number, rate in ((2, 50), (3, 100), (4, 250), (5, 500))
    ),
    Experiment(
        EXPERTFLOW,
        "figure 6.6",
        "speed-up by token trees, five sets of prompts",
        _THESIS,
        "not",
        "1.26 to 1.63 instead of 1.91 to 2.75: the draft has 0.6 times the target's active parameters, not 0.02.",
    ),
    Experiment(
        LIGHTNING,
        "table 2",
        "machines and models S1, S2, S6 to S9",
        "moeflow simulate pipeline --machine paper-s1 --model mixtral-8x7b --batch-size 936 --micro-batch 36",
        "reproduced",
        "Machine and model files have these settings.",
    ),
    Experiment(
        LIGHTNING, "table 3", "workloads", _LIGHTNING_STUDY, "reproduced", "The predictions have these workloads."
    ),
    Experiment(
        LIGHTNING,
        "figure 4",
        "roofline of attention",
        "moeflow plan mixtral-8x7b --machine paper-s2 --roofline roofs.png",
        "reproduced",
        "Roofs, both turning points and the balance point are drawn from equations 7 to 11.",
    ),
    Experiment(
        LIGHTNING,
        "figure 5",
        "roofline of experts",
        "moeflow plan mixtral-8x7b --machine paper-s2 --roofline roofs.png",
        "reproduced",
        "As figure 4.",
    ),
    Experiment(
        LIGHTNING,
        "figure 6",
        "schedules of CGOPipe and of four others",
        "moeflow simulate pipeline --machine paper-s1 --model mixtral-8x7b --batch-size 936 --micro-batch 36 "
        "--picture schedules.png",
        "reproduced",
        "The picture has each pipeline's tasks and idle times.",
    ),
    Experiment(
        LIGHTNING,
        "figure 7",
        "throughput of MTBench",
        _LIGHTNING_STUDY,
        "partly",
        "All 22 padded predictions are within 35%, but only 4 of 8 without padding.",
    ),
    Experiment(
        LIGHTNING,
        "figure 8",
        "two and four T4s",
        _LIGHTNING_STUDY,
        "partly",
        "6 of 8 predictions are within 35%; steps on two T4s from 128 tokens on are not explained.",
    ),
    Experiment(
        LIGHTNING,
        "figure 9",
        "attention on the host beside moving keys and values",
        "python -m studies.attention_places mixtral-8x7b --device emulated:4GiB,3",
        "partly",
        "Attention is 3 to 11 times as fast as moving, over an emulated link of 3 GB/s.",
    ),
    Experiment(
        LIGHTNING,
        "figure 10",
        "the best policy as link and host change",
        _LIGHTNING_STUDY,
        "reproduced",
        "Both statements hold.",
    ),
    Experiment(
        LIGHTNING,
        "table 4",
        "throughput of HELM",
        _LIGHTNING_STUDY,
        "reproduced",
        "15 of 16 predictions are within 35%; long prompts on the T4 are 37% off.",
    ),
    Experiment(LIGHTNING, "table 5", "variants of FlexGen", _LIGHTNING_STUDY, "reproduced", "All four are within 35%."),
    Experiment(
        SLICED,
        "figure 6.1",
        "time of the first and last encoder and decoder layer",
        _SLICED_STUDY,
        "partly",
        "Encoder layers agree; decoder layers gain here, as the baseline pads each expert's rows.",
    ),
    Experiment(
        SLICED,
        "figure 6.2",
        "speed-up over the number of experts",
        _SLICED_STUDY,
        "partly",
        "8.6 to 34.8 with 8 to 64 experts, as a CPU pays for padded rows in full; published are up to 6.84.",
    ),
    Experiment(
        SLICED,
        "figure 6.3",
        "speed-up over the batch",
        _SLICED_STUDY,
        "partly",
        "It grows with the batch, but the baseline is never ahead at small ones.",
    ),
    Experiment(
        SLICED,
        "figure 6.4",
        "speed-up over the router's skew",
        _SLICED_STUDY,
        "reproduced",
        "It grows with the skew; the largest is 1.24 times the least.",
    ),
    Experiment(
        SLICED,
        "figure 6.5",
        "speed-up over the number of hot experts",
        _SLICED_STUDY,
        "reproduced",
        "The largest is 1.23 times the least.",
    ),
    Experiment(
        SLICED,
        "figure 6.6",
        "idle time of each section",
        _SLICED_STUDY,
        "reproduced",
        "Ranks deviate by 13% of an encoder layer with the baseline and hardly with slices.",
    ),
    Experiment(
        SIDA,
        "table 2",
        "memory of Switch Transformers, and its share of experts",
        _SIDA_STUDY,
        "partly",
        "Experts are 83% and 91% of the memory with 128 and 256 of them; the classifiers have two layers.",
    ),
    Experiment(SIDA, "figure 2", "share of memory that a text uses", _SIDA_STUDY, "partly", "SST-2 alone is recorded."),
    Experiment(
        SIDA,
        "figure 3",
        "time for choosing experts",
        _SIDA_STUDY,
        "not",
        "6% to 8% of the time, with one kernel for all experts; published are up to 74%.",
    ),
    Experiment(
        SIDA,
        "figure 4",
        "experts that a text leaves idle",
        _SIDA_STUDY,
        "reproduced",
        "91% and 95% with 128 and 256 experts on SST-2; published are over 60% and 80%.",
    ),
    Experiment(
        SIDA,
        "figure 8",
        "memory reduction",
        _SIDA_STUDY,
        "partly",
        "75% and 86% with 128 and 256 experts on SST-2; MRPC and MultiRC are not recorded.",
    ),
    Experiment(
        SIDA,
        "figure 9",
        "throughput over the mean of three baselines",
        _SIDA_STUDY,
        "partly",
        "3.6 to 47 on SST-2, mostly by loading on demand: over that alone it is 1.0 to 1.9.",
    ),
    Experiment(SIDA, "figure 10", "latency", _SIDA_STUDY, "partly", "As figure 9."),
    Experiment(
        SIDA,
        "figure 11",
        "throughput over the memory budget",
        _SIDA_STUDY,
        "partly",
        "Loading on demand is at least as fast, unless the network replaces routers with one expert a token.",
    ),
    Experiment(
        SIDA,
        "table 3",
        "fidelity",
        _SIDA_STUDY,
        "partly",
        "99% to 103% on SST-2, but permuted experts of these classifiers are as good.",
    ),
    Experiment(
        SIDA,
        "table 4",
        "top-3 hit rate",
        "python -m studies.sida.limits MODEL --data train.tsv --dev dev.tsv",
        "partly",
        "97% and 96% by an oracle with 128 and 256 experts; trained networks reach 72% and 58%, for lack of text.",
    ),
)


def experiments_tables(papers: Iterable[str] = PAPERS) -> list[Table]:
    """Return a table of experiments for each paper."""
    columns = ("result", "subject", "command", "status", "cause")
    return [
        Table(
            paper,
            columns,
            tuple(
                (it.number, it.subject, f"`{it.command}`", it.status, it.cause)
                for it in EXPERIMENTS
                if it.paper == paper
            ),
            words=(1, 2, 3, 4),
        )
        for paper in papers
    ]


def status_counts() -> str:
    """Return how many experiments have each status."""
    counted = {status: sum(it.status == status for it in EXPERIMENTS) for status in STATUSES}
    return ", ".join(f"{number} {status}" for status, number in counted.items() if number)
