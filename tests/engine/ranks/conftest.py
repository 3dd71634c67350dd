from __future__ import annotations

import pytest

from moeflow.engine.ranks import rank_processes, rank_upkeep
from tests.engine.ranks.rank_threads import RankThreads


@pytest.fixture
def in_threads(monkeypatch):
    """Run ranks in this process that report their results to each other at once."""
    monkeypatch.setattr(rank_processes, "RankProcesses", RankThreads)
    monkeypatch.setattr(rank_upkeep, "TIMES_PASSES", 2)
    return monkeypatch
