"""The script that counts right first answers asks through every interface."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.tiny_mixtral import write_tiny_mixtral

INTERFACES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "moeflow chat --url",
    "LLM.chat",
    "moeflow generate --chat",
    "moeflow chat",
)


@pytest.mark.thorough
def test_every_interface_is_asked(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "studies.first_answers",
        tmp_path / "model",
        "--times",
        "1",
        "--question",
        "x",
        "--word",
        "",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True, cwd=ROOT)
    rows = [line for line in done.stdout.splitlines() if "1 of 1" in line]  # the empty word is in every answer
    assert [next((name for name in INTERFACES if f" {name} " in row), row) for row in rows] == list(INTERFACES)
