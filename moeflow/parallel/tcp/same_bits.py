"""Whether two processes compute the same bits: versions, kind of processor, instruction set."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import NamedTuple, Protocol

from moeflow.kernels.cpu import extension


class Computing(Protocol):
    """What computes: a message that has these fields."""

    @property
    def software(self) -> str:
        """Names and versions; results differ in bits between them."""

    @property
    def processor(self) -> str:
        """Its kind."""

    @property
    def cpu_isa(self) -> str:
        """The best instruction set that it has, or may use."""


def own_software() -> str:
    """Return names and versions of what computes here."""
    return " with ".join(f"{name} {importlib.metadata.version(name)}" for name in ("moeflow", "torch", "numpy"))


def own_processor() -> str:
    """Return the kind of processor."""
    return platform.machine()


class OwnBits(NamedTuple):
    """This process; see `Computing`."""

    software: str
    processor: str
    cpu_isa: str

    @classmethod
    def of(cls, cpu_isa: str) -> OwnBits:
        """Return versions and processor here; at most the instruction set `cpu_isa` is used."""
        return cls(own_software(), own_processor(), extension.best_isa(cpu_isa))


def why_bits_differ(theirs: Computing, own: Computing, who: str) -> str:
    """Return why `theirs` cannot compute what `own` does, to the bit; empty: it can. `who` is what `own` is called."""
    isas = extension.ISAS
    if theirs.software != own.software:
        return f"it is {theirs.software}, {who} {own.software}: install the same versions"
    if theirs.processor != own.processor or theirs.cpu_isa not in isas:
        return f"its processor is {theirs.processor}, {who}'s {own.processor}: results would differ"
    if own.cpu_isa not in isas or isas.index(theirs.cpu_isa) < isas.index(own.cpu_isa):
        return (
            f"its instruction set is {theirs.cpu_isa}, {who} uses {own.cpu_isa}: results would differ. "
            f"Start {who} with MOEFLOW_CPU_ISA={theirs.cpu_isa}"
        )
    return ""
