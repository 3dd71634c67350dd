"""A whole test deployment: machines that join are killed, and their network is cut."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moeflow.cli.chaos.chaos import chaos
from tests.packed import pack_beside
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.thorough
LOAD = ["--yes", "--json", "--streams", "4", "--tokens", "200", "--batch-lines", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=4096)
    pack_beside(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("parts", "faults", "duration"),
    [
        (["--replicas", "2"], "node-killed,network-cut,template-killed,disk-full,memory-full,files-full", "2"),
        (["--replicas", "2"], "keeper-stopped,network-silent", "13"),
        (["--ranks", "2"], "engine-killed,clients-slow", "2"),
    ],
)
def test_no_fault_changes_an_answer(model, parts, faults, duration):
    command = ["--cluster", "--model", model, *parts, "--faults", faults, "--duration", duration, *LOAD]
    found = CliRunner().invoke(chaos, command, catch_exceptions=False, standalone_mode=False)
    rows = json.loads(found.stdout)["rows"]
    assert {row["fault"]: row["problems"] for row in rows} == {fault: [] for fault in faults.split(",")}
    assert all(row["num_batch_equal"] == row["num_batch_lines"] == 4 for row in rows)
    assert found.return_value == 0
