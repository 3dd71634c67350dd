"""Published results of SiDA beside records of its study."""

from __future__ import annotations

from studies.paper.recorded import recorded
from studies.paper.sida_table import sida_table
from tests.studies import running


def sida_record(num_experts: int, time: str = "2026-01-01", top_3: float = 0.5) -> dict:
    speeds = {"all resident": 100, "layer by layer": 1, "layers ahead": 2, "on demand": 9, "predicted, lossy": 12}
    return {
        "kind": "sida",
        "time": time,
        "data": "sst2",
        "num_layers": 2,
        "num_experts": num_experts,
        "slab_bytes": 10,
        "dense_bytes": 20 * num_experts,
        "usage": {
            "num_tokens": [1] * 4,
            "used_experts": [num_experts] * 4,
            "routing_s": 0.004,
            "hit_rates": {"1": 0.1, "3": top_3},
        },
        "answers": {"own": {"right": 0.8}, "sida": {"right": 0.6}, "sida:3": {"right": 0.4}},
        "rows": [{"share": 10, "way": way, "texts_per_s": it, "latency_s": 1 / it} for way, it in speeds.items()],
    }


def test_sida_from_a_record():
    table = sida_table([sida_record(128), sida_record(128, "2026-02-01", 0.75), sida_record(8)])
    found = {name: (published, ours) for name, published, ours in table.rows}
    assert found["table 2: experts' share of memory, 128 experts"] == ("98%", "50%")
    assert found["figure 4: experts that a text leaves idle, 8 experts"] == ("", "50%")
    assert found["figure 8: memory reduction, 128 experts"] == ("over 60%", "25%")
    assert found["figure 3: time for choosing experts, 8 experts"] == ("", "10%")
    assert found["figure 9: throughput over the mean of three baselines, 128 experts"] == ("2.60", "3.00 to 3.00")
    assert found["throughput over loading on demand alone, 8 experts"] == ("", "1.33 to 1.33")
    assert found["figure 11: budgets at which it is fastest, 128 experts"] == ("all", "1 of 1")
    assert found["table 3: fidelity, 8 experts"] == ("98.3%", "50.0% to 75.0%")
    assert found["table 4: top-3 hit rate, 128 experts"] == ("98.8%", "75.0%")


def test_the_command_shows_kept_records():
    shown = running.run("studies.paper", "sida")
    assert shown.exit_code == 0, shown.output
    assert recorded("sida")[-1]["time"][:10] in shown.output
