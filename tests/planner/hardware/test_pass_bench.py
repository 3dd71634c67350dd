"""The time of passes outside kernels: by a clock of the test, and against the engine itself."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.cpu import extension
from moeflow.planner.hardware import pass_bench
from moeflow.planner.hardware.pass_bench import EngineTimes, measure_engine, median_times

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


def test_a_pass_is_taken_apart(monkeypatch):
    """A pass of 1 takes 100 us plus 3 for its token, and one of 32 takes 32 * 3. A stop takes 700, plus 20 for each
    expert."""

    def run_pass(driver, chill):
        num_sequences, count = len(driver._scheduler.waiting), driver._tiny.shape.routing.top_k
        beside_s = 100e-6 + num_sequences * 3e-6
        kernels_s = 40e-6
        if not driver._tiny.comes_from_disk:
            return pass_bench._Pass(beside_s + kernels_s, kernels_s)
        return pass_bench._Pass(beside_s + kernels_s + 700e-6 + count * 20e-6, 0.0)

    monkeypatch.setattr(pass_bench._Driver, "run_pass", run_pass)
    monkeypatch.setattr(pass_bench._Driver, "_prefill", lambda _: None)
    found = measure_engine(lambda: None, 3, 1.0)
    assert found.pass_s == pytest.approx(100e-6 * (1 + pass_bench.ENGINE_OF_PASS))
    assert found.token_s == pytest.approx(3e-6 * (1 + pass_bench.ENGINE_OF_TOKEN))
    assert found.stop_s == pytest.approx(700e-6)
    assert found.load_s == pytest.approx(20e-6)


def test_each_pass_lacks_what_it_is_to_lack():
    chilled = []
    with torch.inference_mode(), pass_bench._absent_experts(8) as many:
        driver = pass_bench._Driver(many, 1, 3)
        before = many._cache.stats()
        for _ in range(3):
            driver.run_pass(lambda: chilled.append(1))
        found = many._cache.stats() - before
    assert (found.hits, found.misses) == (0, 3 * (8 + 8))  # others, which drive the last ones out, and those lacking
    assert len(chilled) == 2 * 3


def test_so_many_passes_are_run_unless_they_take_too_long(monkeypatch):
    count = []
    run_pass = pass_bench._Driver.run_pass
    monkeypatch.setattr(
        pass_bench._Driver, "run_pass", lambda self, chill: count.append(1) or run_pass(self, lambda: None)
    )
    measure_engine(lambda: None, 2, 60.0)
    two = len(count)
    count.clear()
    measure_engine(lambda: None, 9, 60.0)
    nine = len(count)
    count.clear()
    measure_engine(lambda: None, 9, 0.0)
    assert nine - two == 7 * 4  # four kinds
    assert nine - len(count) == (9 - pass_bench.MIN_PASSES) * 4


def test_the_median_of_each_counts():
    times = [EngineTimes(1.0, 5.0, 2.0, 9.0), EngineTimes(3.0, 4.0, 1.0, 8.0), EngineTimes(2.0, 6.0, 3.0, 7.0)]
    assert median_times(times) == EngineTimes(2.0, 5.0, 2.0, 8.0)
