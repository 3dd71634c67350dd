"""ExpertFlow's tables 6.1 to 6.3: the published figures, and the same traffic on the virtual clock.

GPT-MoE on four T4s (`gpt-moe` on `g4dn-12xlarge`). The scheduler and the clock are those of `moeflow simulate serve`.
`TERMS` are the foundations of ExpertFlow's pass times, each in addition to the earlier ones:

- *data sheets*: float16, every kernel at its roof, boost clock. Four devices share all work evenly.
- *float32*: the format of the authors' example (`DT_FLOAT`). The thesis names mixed precision as future work.
- *measured parts*: the machine file. Its T4 reads 220 GB/s and runs at its base clock.
- *plan*: section 3.3. Each device has the attention and dense networks of a quarter of the tokens, and a quarter of the
  experts. Tokens cross PCIe before and after their experts. All tokens get logits, as in the example's last layer.

The thesis has no limits of a batch; the authors' example does: github.com/flexflow/FlexFlow, branch inference,
`examples/cpp/inference` and `batch_config.h`, in the versions with 2,560 requests. Four batches are in flight. Each has
up to 256 requests and 8 x 256 tokens. Tokens choose one of 64 experts, in blocks of 16.

Two constants are fitted, each to one published figure, and all others are predictions:

- `wait_s`: seconds that each of ExpertFlow's latencies has beyond the simulated ones, from the least latency at 50
  requests/s. It is no computing time. At 50 requests/s the run ends 1.8 s after the last arrival is due, but no request
  takes less than 5.6 s. So latencies count from an earlier moment than throughputs.
- The rows of FasterTransformer's batches (`STATIC_BATCHES`), from its published rate at 100 requests/s. It runs in
  float16 (`weight_data_type`), and all devices share each matrix (`tensor_para_size`), with two all-reduces a
  layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import correlation
from typing import Any, Final

from moeflow.bench.metrics import Served, percentile
from moeflow.bench.serve_run import result
from moeflow.core.batch import Batch
from moeflow.core.engine_config import BLOCK_SIZE, SchedulerConfig
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.models.registry import read_bare_config
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.roofline import processor_of, work_seconds
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.model_files import shipped_models
from moeflow.planner.simulator.serve_run import PassSeconds, block_count, pass_seconds_of, serve_virtually
from moeflow.workload.poisson import WorkloadSpec, make_arrivals

EXPERTFLOW: Final = "ExpertFlow"
FASTER_TRANSFORMER: Final = "FasterTransformer"
CONTINUOUS: Final = "continuous"
STATIC: Final = "static"
SYSTEMS: Final = {EXPERTFLOW: CONTINUOUS, FASTER_TRANSFORMER: STATIC}
RATES: Final = (50, 100, 250, 500)  # requests/s
NUM_REQUESTS: Final = 2560
FITTED_RATE: Final = {"wait": 50, "static batch": 100}  # where each fitted constant is from
STATIC_BATCHES: Final = (64, 128, 256)
MAX_SEQS: Final = 4 * 256
MAX_TOKENS: Final = 4 * 8 * 256
TERMS: Final = ("data sheets", "float32", "measured parts", "plan")
HALF: Final = Formats(matrices="float16", embeddings="float16", kv="float16", activation_bytes=2)
FULL: Final = Formats(matrices="float32", embeddings="float32", kv="float32")
LENGTH: Final = 256  # tokens of the longest request
LENGTH_STEP: Final = 64  # of the ranges of lengths

Run = dict[str, Any]  # of one system at one rate: figures by name


@dataclass(frozen=True, slots=True)
class Published:
    """A system's row of the three tables."""

    requests_per_s: float
    tokens_per_s: float
    latency_ms: tuple[float, float, float]  # average, least, most


PUBLISHED: Final[Mapping[tuple[str, int], Published]] = {
    (EXPERTFLOW, 50): Published(48.302, 3119.0, (8475.191, 5621.950, 12886.612)),
    (EXPERTFLOW, 100): Published(83.190, 5373.75, (10217.809, 5674.259, 17971.726)),
    (EXPERTFLOW, 250): Published(105.239, 6806.7, (16223.166, 5862.399, 25789.413)),
    (EXPERTFLOW, 500): Published(105.524, 6815.65, (18541.337, 6141.7325, 25671.801)),
    (FASTER_TRANSFORMER, 100): Published(53.736, 3471.18, (10747.242, 277.899, 21115.594)),
    (FASTER_TRANSFORMER, 250): Published(54.399, 3518.42, (18646.640, 224.331, 36858.986)),
    (FASTER_TRANSFORMER, 500): Published(54.226, 3502.37, (21297.635, 275.063, 42134.64)),
}


@cache
def costs_of(formats: Formats) -> ModelCosts:
    """Return the costs of GPT-MoE."""
    return ModelCosts(read_bare_config(shipped_models()["gpt-moe"]), formats)


def four_t4s(*, is_measured: bool) -> Machine:
    """Return the machine, with measured parts or every kernel at its roof."""
    machine = load_machine("g4dn-12xlarge")
    if is_measured:
        return machine
    device = machine.level(DEVICE)
    device = replace(device, processor=replace(processor_of(device), efficiencies=(), default_efficiency=1.0))
    return replace(machine, levels=tuple(device if it.name == DEVICE else it for it in machine.levels))


def expertflow_pass(term: str) -> tuple[ModelCosts, PassSeconds]:
    """Return the costs of the model, and the seconds of ExpertFlow's passes up to a term."""
    costs = costs_of(HALF if term == "data sheets" else FULL)
    machine = four_t4s(is_measured=term in ("measured parts", "plan"))
    return costs, planned_pass(machine, costs) if term == "plan" else pass_seconds_of(
        machine, costs, machine.num_devices
    )


def planned_pass(machine: Machine, costs: ModelCosts) -> PassSeconds:
    """Return the seconds of a pass whose devices have a share of the tokens, and a share of the experts."""
    level, number, shape = machine.compute_level, machine.num_devices, costs.shape
    num_layers, num_moe = shape.num_layers, len(shape.moe_layers)

    def seconds(batch: Batch) -> float:
        share = batch.num_tokens / number
        seen = sum(entry.num_tokens * (entry.start + (entry.num_tokens + 1) / 2) for entry in batch.entries) / number
        read = sum(entry.stop for entry in batch.entries) / number
        works = [
            *((num_layers, it) for it in (costs.pre_attention(share), costs.attention(share, seen, read))),
            (num_layers, costs.output_projection(share)),
            (num_layers - num_moe, costs.dense(share)),
            (num_moe, costs.router(share)),
            (1, costs.head(share)),
        ]
        own_s = sum(count * work_seconds(level, work) for count, work in works)
        experts_s = num_moe * work_seconds(level, costs.experts(batch.num_tokens), number)
        crossing = share * shape.hidden_size * costs.formats.activation_bytes * (1 - 1 / number)
        return own_s + experts_s + 2 * num_moe * _crossing_s(machine, crossing)

    return seconds


def static_pass() -> PassSeconds:
    """Return the seconds of FasterTransformer's passes."""
    machine, costs = four_t4s(is_measured=True), costs_of(HALF)
    computing, number = pass_seconds_of(machine, costs, machine.num_devices), machine.num_devices

    def seconds(batch: Batch) -> float:
        row_bytes = costs.shape.hidden_size * costs.formats.activation_bytes
        crossing = 2 * (1 - 1 / number) * batch.num_tokens * row_bytes  # of an all-reduce, each way
        return computing(batch) + 2 * costs.shape.num_layers * _crossing_s(machine, crossing)

    return seconds


def _crossing_s(machine: Machine, num_bytes: float) -> float:
    """Return the seconds of bytes that each device sends and gets, on a link of its own."""
    return max(machine.link(*ends).seconds(num_bytes) for ends in ((DEVICE, RAM), (RAM, DEVICE)))


def serve(policy: str, rate: float, costs: ModelCosts, seconds: PassSeconds, max_seqs: int, num_requests: int) -> Run:
    """Return what a system makes of the thesis' traffic at a rate, on the virtual clock."""
    spec = WorkloadSpec(rate=rate, num_requests=num_requests, vocab_size=costs.shape.vocab_size)
    machine = four_t4s(is_measured=True)
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=block_count(machine, costs, BLOCK_SIZE, machine.num_devices),
        max_model_len=LENGTH,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=MAX_TOKENS if policy == CONTINUOUS else max_seqs * spec.max_prompt,
        policy=policy,
        batch_timeout_s=0.0,
    )
    served = [
        Served(one.arrival.at_s, one.first_s, one.end_s, len(one.arrival.prompt_token_ids), one.arrival.num_new)
        for one in serve_virtually(make_arrivals(spec), config, seconds)
    ]
    return result(spec, served)


def figures(fields: Run) -> Run:
    """Return the figures of the tables, and latency by length of a request (figures 6.2 to 6.5)."""
    summary, requests = fields["summary"], fields["requests"]
    names = ("requests_per_s", "tokens_per_s", "latency_avg_s", "latency_min_s", "latency_max_s")
    lengths = [prompt + new for prompt, new in zip(requests["prompt"], requests["new"], strict=True)]
    latencies: Sequence[float] = requests["latency_s"]
    by_length = [
        [latency for length, latency in zip(lengths, latencies, strict=True) if below - LENGTH_STEP < length <= below]
        for below in range(LENGTH_STEP, LENGTH + 1, LENGTH_STEP)
    ]
    return {name: round(float(summary[name]), 3) for name in names} | {
        "follows_length": round(correlation(lengths, latencies), 3),
        "by_length": [
            [round(percentile(found, it), 3) for it in (10, 50, 90)] if found else None for found in by_length
        ],
    }


def fitted_static_batch(num_requests: int, on_run: Callable[[str], None]) -> tuple[int, dict[int, float]]:
    """Return the rows of a static batch that come closest to the published rate, and the rate of each number."""
    rate, found = FITTED_RATE["static batch"], dict[int, float]()
    for rows in STATIC_BATCHES:
        on_run(f"static batches of {rows}")
        run = serve(STATIC, rate, costs_of(HALF), static_pass(), rows, num_requests)
        found[rows] = round(run["summary"]["requests_per_s"], 3)
    aim = PUBLISHED[FASTER_TRANSFORMER, rate].requests_per_s
    return min(found, key=lambda rows: abs(found[rows] / aim - 1)), found


def simulations(
    num_requests: int, on_run: Callable[[str], None], on_requests: Callable[[str, float, Run], None]
) -> dict[str, Any]:
    """Return the fields of a record: both systems at all rates, ExpertFlow with each term, and the fitted constants.

    `on_requests` gets the policy, the rate and the requests of each run with all terms.
    """
    rows, tried = fitted_static_batch(num_requests, on_run)
    runs = []
    for rate in RATES:
        on_run(f"static batches at {rate} requests/s")
        fields = serve(STATIC, rate, costs_of(HALF), static_pass(), rows, num_requests)
        on_requests(STATIC, rate, fields["requests"])
        runs.append({"system": FASTER_TRANSFORMER, "rate": rate, "term": TERMS[-1], **figures(fields)})
        for term in TERMS:
            on_run(f"{term} at {rate} requests/s")
            fields = serve(CONTINUOUS, rate, *expertflow_pass(term), MAX_SEQS, num_requests)
            runs.append({"system": EXPERTFLOW, "rate": rate, "term": term, **figures(fields)})
        on_requests(CONTINUOUS, rate, fields["requests"])
    at = FITTED_RATE["wait"]
    least = next(it for it in runs if (it["system"], it["rate"], it["term"]) == (EXPERTFLOW, at, TERMS[-1]))
    wait_s = PUBLISHED[EXPERTFLOW, at].latency_ms[1] / 1e3 - least["latency_min_s"]
    return {"runs": runs, "static_batch": rows, "static_rates": tried, "wait_s": round(wait_s, 3)}


def num_steps() -> int:
    """Return the number of runs that `simulations` reports."""
    return len(STATIC_BATCHES) + len(RATES) * (1 + len(TERMS))
