from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moeflow.core.errors import ConfigError
from moeflow.core.plan import Workload
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.machine_files import load_machine, machine_names
from moeflow.planner.planning import PlanRequest, plan_for
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings

NAMES = [
    "a100-80g",
    "g4dn-12xlarge",
    "h100",
    "h200",
    "l4",
    *(f"paper-s{number}" for number in (1, 2, 6, 7, 8, 9)),
    "t4",
]


def test_all_hosts_are_shipped():
    assert machine_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_machine_is_whole_and_says_where_its_figures_are_from(name):
    machine = load_machine(name)
    assert machine.name == name
    assert machine_from_json(machine_to_json(machine), name) == machine
    described = {field for field, _ in machine.sources}
    assert described >= {"device", "ram", "disk", "ram to device"}
    speeds = [level.read_bytes_per_s for level in machine.levels]
    assert speeds == sorted(speeds)
    assert machine.compute_level.name == "device"


def test_a_file_is_read_and_a_typing_error_is_answered(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(machine_to_json(load_machine("t4")))
    assert load_machine(str(file)) == load_machine("t4")
    with pytest.raises(ConfigError, match="did you mean 'paper-s1'"):
        load_machine("papers1")


QWEN3_1B = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "intermediate_size": 768,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("batch", "measured"), [(1, 267), (8, 688), (32, 1561)])
def test_the_host_of_the_h200_decodes_as_fast_as_a_measured_one(tmp_path, batch, measured):
    """Tokens/s in q8_0 with 16 threads."""
    machine = load_machine("h200")
    levels = tuple(level for level in machine.levels if level.name in ("disk", "ram"))
    links = tuple(link for link in machine.links if {link.source, link.target} == {"disk", "ram"})
    host = replace(machine, levels=levels, links=links, num_devices=0)
    config, described = tmp_path / "config.json", tmp_path / "host.json"
    config.write_text(json.dumps(QWEN3_1B))
    described.write_text(machine_to_json(host))
    usage = Usage(workload=Workload(prompt_len=512, gen_len=64, max_prompt_len=512), num_sequences=batch)
    settings = Settings(model=str(config), quantize="int8")
    forecast = plan_for(PlanRequest(settings=settings, usage=usage, machine=str(described))).plan.forecast
    assert forecast.decode_tokens_per_s.value == pytest.approx(measured, rel=0.2)
