"""What computes other bits, or may, does not join."""

from __future__ import annotations

import dataclasses

import pytest

from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.same_bits import own_software, why_bits_differ

WORST, *_, BEST = extension.ISAS


@dataclasses.dataclass(frozen=True)
class Machine:
    software: str = "moeflow 1.0"
    processor: str = "x86_64"
    cpu_isa: str = BEST


@pytest.mark.parametrize(
    ("theirs", "own", "reason"),
    [
        (Machine(), Machine(), ""),
        (Machine(cpu_isa=BEST), Machine(cpu_isa=WORST), ""),  # it can use the server's
        (Machine(cpu_isa=WORST), Machine(cpu_isa=BEST), f"MOEFLOW_CPU_ISA={WORST}"),
        (Machine(software="moeflow 1.1"), Machine(), "it is moeflow 1.1, the server moeflow 1.0: install the same"),
        (Machine(software="moeflow 1.0"), Machine(software="moeflow 1.1"), "install the same versions"),
        (Machine(processor="aarch64"), Machine(), "its processor is aarch64, the server's x86_64"),
        (Machine(cpu_isa="another"), Machine(), "its processor is x86_64"),
    ],
)
def test_only_equal_bits_are_taken(theirs, own, reason):
    found = why_bits_differ(theirs, own, "the server")
    assert (reason in found) if reason else not found


def test_versions_of_all_that_computes_are_compared():
    assert [word for word in own_software().split() if not word[0].isdigit()] == [
        "moeflow",
        "with",
        "torch",
        "with",
        "numpy",
    ]
