"""Records of other studies, for the papers' results that those studies measure."""

from __future__ import annotations

from typing import Final

from moeflow.bench.records import Record, read
from studies.harness.needs import ROOT

RESULTS: Final = ROOT / "docs" / "studies" / "results"


def recorded(kind: str) -> list[Record]:
    """Return the kept records of a study, oldest first."""
    records = [record for record in read([RESULTS / f"{kind}.jsonl"]) if record["kind"] == kind]
    return sorted(records, key=lambda record: record["time"])
