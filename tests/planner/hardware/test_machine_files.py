from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.planner.hardware.hardware_json import machine_from_json, machine_to_json
from moeflow.planner.hardware.machine_files import load_machine, machine_names

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
