"""A process ends with the one that has started it, but not while an engine needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

PATIENCE_S = 30.0
PROCESS = """
import os, sys
from moeflow.processes.cluster.orphan_watch import OrphanWatch
go_on = int(sys.argv[1])
watch = OrphanWatch(sys.stdin.buffer)
for _ in range(2):
    with watch.computing():
        print("computes", flush=True)
        os.read(go_on, 1)
    print("waits", flush=True)
    os.read(go_on, 1)
print("the end", flush=True)
os.read(go_on, 1)
"""


class Process:
    def __init__(self) -> None:
        reader, self._go_on = os.pipe()
        command = [sys.executable, "-c", PROCESS, str(reader)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=(reader,), text=True)
        os.close(reader)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        os.write(self._go_on, b"x")

    def orphan(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        with self.process:
            self.process.kill()
        os.close(self._go_on)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_it_goes_from_engine_to_engine_and_ends_at_once_if_it_waits(process):
    for _ in range(2):
        assert process.says() == "computes"
        process.go_on()
        assert process.says() == "waits"
        process.go_on()
    assert process.says() == "the end"
    process.orphan()
    assert process.process.wait(PATIENCE_S) == 0


def test_it_computes_for_the_engine_that_needs_it_and_for_no_other(process):
    assert process.says() == "computes"
    process.orphan()
    with pytest.raises(subprocess.TimeoutExpired):
        process.process.wait(0.2)
    process.go_on()
    assert process.process.wait(PATIENCE_S) == 0
