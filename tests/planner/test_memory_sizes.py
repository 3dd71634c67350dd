"""More memory never makes a worse plan: over many sizes of --memory, on models of different proportions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.units import MIB
from moeflow.kernels.cpu import extension
from moeflow.planner.hardware.host import HostResources
from moeflow.planner.resolve import resolve
from moeflow.planner.usage import CONVERSATION, OFFLINE, SERVING, Usage
from moeflow.settings.settings import Settings
from tests.planner.examples import machine
from tests.planner.holes import write_holes

pytestmark = [pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()), pytest.mark.slow]

every_size = pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.thorough)])
NUM_SIZES = {SERVING: 200, CONVERSATION: 50, OFFLINE: 50}
HERE = HostResources(2, 1 << 40, 1 << 40, None, 0, process_bytes=95 * MIB)
MODELS = {  # vocabulary, hidden and expert widths, layers, heads of queries and of keys, experts, top_k
    "large vocabulary": (49152, 576, 1536, 12, 9, 3, 8, 2),
    "few large experts": (8000, 1024, 3584, 4, 16, 4, 8, 2),
    "many small experts": (32000, 512, 192, 8, 8, 2, 64, 8),
}


@dataclass(frozen=True)
class Outcome:
    """What a plan keeps and brings."""

    experts: float  # share in memory while as many requests decode as may
    max_num_seqs: int
    tokens_per_s: float
    alone_tokens_per_s: float


def outcomes(folder: Path, name: str, usage: Usage, step: int) -> list[Outcome | None]:
    """Return the plans of every `step`-th size, from too little memory to more than enough; None: refused."""
    weights = write_holes(folder, MODELS[name])
    found: list[Outcome | None] = []
    for number in range(0, NUM_SIZES[usage], step):
        size = int((150 + (1.3 * weights + 900) * number / NUM_SIZES[usage]) * MIB)
        settings = Settings(model=str(folder), cache_dir=folder, memory_bytes=size, is_served=usage is SERVING)
        try:
            plan = resolve(settings, usage, machine_of=lambda _: machine(ram=1 << 40), resources=HERE).plan
        except CapacityError:
            found.append(None)
            continue
        forecast = plan.forecast
        assert forecast is not None
        found.append(
            Outcome(
                1 - forecast.policy.experts_on_disk,
                plan.config.scheduler.max_num_seqs,
                forecast.tokens_per_s.value,
                forecast.decode_alone_tokens_per_s.value,
            )
        )
    return found


@every_size
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("usage", [SERVING, CONVERSATION], ids=["served", "conversation"])
def test_where_people_wait_more_memory_keeps_as_many_experts_and_is_as_fast(tmp_path, name, usage, step):
    found = outcomes(tmp_path, name, usage, step)
    accepted = [it for it in found if it is not None]
    assert found == [None] * (len(found) - len(accepted)) + accepted, "what is accepted is not refused with more"
    assert 0 < len(accepted) < len(found)
    assert accepted[0].experts < 0.5 < 1 == accepted[-1].experts
    for less, more in itertools.pairwise(accepted):
        assert more.experts >= less.experts
        assert more.tokens_per_s >= less.tokens_per_s * 0.999
        assert more.alone_tokens_per_s >= less.alone_tokens_per_s * 0.999
        assert more.max_num_seqs >= less.max_num_seqs or more.experts > less.experts


@every_size
@pytest.mark.parametrize("name", MODELS)
def test_offline_more_memory_is_as_fast_or_keeps_more(tmp_path, name, step):
    found = outcomes(tmp_path, name, OFFLINE, step)
    accepted = [it for it in found if it is not None]
    assert found == [None] * (len(found) - len(accepted)) + accepted
    for less, more in itertools.pairwise(accepted):
        assert more.experts >= less.experts or more.max_num_seqs >= less.max_num_seqs
        assert more.tokens_per_s >= less.tokens_per_s * 0.95
