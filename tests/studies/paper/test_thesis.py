"""ExpertFlow's published figures, and the simulation of the same traffic."""

from __future__ import annotations

import importlib
import json

import pytest

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from studies.paper import thesis
from studies.paper.thesis import CONTINUOUS, EXPERTFLOW, PUBLISHED, RATES, STATIC, TERMS
from studies.paper.thesis_measured import measure
from studies.paper.thesis_tables import SPECULATION, measured_tables, simulated_tables, speculation_table
from tests.studies import running

command = importlib.import_module("studies.paper.expertflow")

HIDDEN, WIDTH, LAYERS, MOE, EXPERTS, VOCAB = 1024, 4096, 24, 12, 64, 51200
DEVICES, BANDWIDTH, CLOCK = 4, 320e9 * 0.69, 8.1e12 * 0.37
LAUNCH_S = 1e-5
NUM = 12  # requests of a quick simulation


def decoding(num: int, context: int) -> Batch:
    request = Request("", [1], SamplingParams(), max_tokens=1)
    entries = [BatchEntry(request, context, 1, (0,), samples=True) for _ in range(num)]
    return Batch(tuple(entries))


def by_hand(num: int, context: int) -> float:
    """Return the seconds of a pass from sizes alone: each kernel is bound by reading or by computing."""
    share = num / DEVICES

    def kernel_s(values: float, tokens: float, read: float | None = None) -> float:
        read = values if read is None else read
        return max(4 * read / BANDWIDTH, 2 * tokens * values / CLOCK) + LAUNCH_S

    attention_s = 4 * 2 * HIDDEN * share * (context + 1) / BANDWIDTH + LAUNCH_S
    layer_s = kernel_s(3 * HIDDEN**2, share) + attention_s + kernel_s(HIDDEN**2, share)
    used = EXPERTS * (1 - (1 - 1 / EXPERTS) ** num)
    expert = 2 * HIDDEN * WIDTH
    experts_s = max(4 * used * expert / BANDWIDTH, 2 * num * expert / CLOCK) / DEVICES + LAUNCH_S
    rest_s = (LAYERS - MOE) * kernel_s(expert, share) + MOE * kernel_s(HIDDEN * EXPERTS, share)
    return LAYERS * layer_s + rest_s + MOE * experts_s + kernel_s(VOCAB * HIDDEN, share)


def test_published_figures_agree_with_each_other():
    for figures in PUBLISHED.values():
        assert figures.tokens_per_s / figures.requests_per_s == pytest.approx(64.5, rel=0.01)  # uniform from 1 to 128
        average, least, most = figures.latency_ms
        assert least < average < most


@pytest.mark.parametrize("num", [4, 4000])
def test_a_pass_takes_what_its_bytes_and_operations_take(num):
    _, seconds = thesis.expertflow_pass("plan")
    crossing = 2 * MOE * num / DEVICES * HIDDEN * 4 * 0.75
    got, least = seconds(decoding(num, 100)), by_hand(num, 100)
    assert least + crossing / 12e9 - 1e-9 <= got <= least * 1.02 + 2 * MOE * 2e-5 + crossing / 6e9


def test_each_term_costs_time():
    batch = decoding(600, 100)
    times = [thesis.expertflow_pass(term)[1](batch) for term in TERMS]
    assert times == sorted(times)


@pytest.fixture(scope="module")
def simulated():
    told, requests = [], []
    found = thesis.simulations(NUM, told.append, lambda *run: requests.append(run))
    assert len(told) == thesis.num_steps()
    return found, requests


def test_each_system_runs_at_each_rate(simulated):
    found, requests = simulated
    assert [run[:2] for run in requests] == [(policy, rate) for rate in RATES for policy in (STATIC, CONTINUOUS)]
    assert all(len(run[2]["latency_s"]) == NUM for run in requests)
    assert len(found["runs"]) == len(RATES) * (1 + len(TERMS))
    assert found["static_batch"] in found["static_rates"]


def test_the_fitted_seconds_make_one_published_figure(simulated):
    found, _ = simulated
    at_50 = next(it for it in found["runs"] if (it["system"], it["rate"], it["term"]) == (EXPERTFLOW, 50, TERMS[-1]))
    assert at_50["latency_min_s"] + found["wait_s"] == pytest.approx(5.62195, abs=1e-3)


def test_tables_mark_what_is_fitted(simulated):
    requests, tokens, latencies, lengths, terms = simulated_tables(simulated[0])
    for table, row in ((requests, 1), (tokens, 1), (latencies, 0)):
        marked = [number for number, cells in enumerate(table.rows) if any("fitted" in cell for cell in cells)]
        assert marked == [row]
    assert not any("measured" in table.title for table in (requests, tokens, latencies, lengths))
    assert len(terms.rows) == len(RATES)


MEASURED = {
    "runs": [
        {
            "policy": policy,
            "rate": rate,
            "measured_rate": rate / 10,
            "requests_per_s": 2.0 * factor,
            "tokens_per_s": 130.0 * factor,
            "latency_avg_s": 4.0 / factor,
            "latency_min_s": 1.0,
            "latency_max_s": 9.0,
            "follows_length": 0.5 * factor,
            "by_length": [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], None],
        }
        for rate in RATES
        for policy, factor in ((CONTINUOUS, 1.5), (STATIC, 1.0))
    ],
    "sustained_per_s": 10.55,
    "num_requests": 4,
    "max_seqs": 2,
    "weight_format": "float32",
    "machine": {"threads": 1},
}


def test_measured_ratios_stand_beside_published_ones():
    rates, lengths = measured_tables(MEASURED)
    assert rates.rows[-1][0] == "50.0 requests/s (as 500)"
    assert rates.rows[-1][-4:] == ("1.95", "1.50", "0.87", "0.67")
    assert rates.rows[0][-4:] == ("", "1.50", "", "0.67")
    assert lengths.notes[0].startswith("Holds: ")


def test_drafts_stand_beside_the_published_range():
    sets = [{"set": "chat", "speedup": 1.2}, {"set": "code", "speedup": 2.0}]
    slower = [{**one, "speedup": one["speedup"] - 0.1} for one in sets]
    arms = [{"name": name, "size": None, "sets": found} for name, found in (("a", slower), ("b", sets))]
    table = speculation_table({"arms": arms, "model": "m", "time": "2026-01-01T00:00"})
    assert table.rows == (("chat", "1.91 to 2.75", "1.20", "b"), ("code", "1.91 to 2.75", "2.00", "b"))
    assert SPECULATION == (1.91, 2.75)


def test_the_command_keeps_a_record_of_each_part(simulated, monkeypatch, tmp_path):
    monkeypatch.setattr(command.thesis, "simulations", lambda *_: simulated[0])
    found = {name: value for name, value in MEASURED.items() if name != "machine"} | {"threads": 1}
    monkeypatch.setattr(command.thesis_measured, "measure", lambda *_: found)
    out = tmp_path / "paper.jsonl"
    shown = running.run("studies.paper", "expertflow", "--out", str(out))
    assert shown.exit_code == 0, shown.output
    for title in ("Table 6.1, simulated", "Tables 6.1 to 6.3, measured here", "Figure 6.6, recorded here"):
        assert title in shown.output
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["expertflow", "expertflow_measured"]


@pytest.mark.thorough
def test_a_small_model_is_measured_with_both_policies(tmp_path):
    requests = []
    found = measure(tmp_path, 4, lambda _: None, lambda *run: requests.append(run))
    assert [run[:2] for run in requests] == [(policy, rate) for rate in RATES for policy in (CONTINUOUS, STATIC)]
    assert len(measured_tables(found)) == 2
