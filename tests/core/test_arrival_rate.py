"""Rates that make sense are taken, all others refused with what to say instead."""

from __future__ import annotations

import math

import pytest

from moeflow.core.arrival_rate import MAX_RATE, MIN_RATE, check_rate
from moeflow.core.errors import ConfigError
from moeflow.core.plan import Workload
from moeflow.workload.poisson import WorkloadSpec


def workload(rate):
    return Workload(prompt_len=8, gen_len=8, max_prompt_len=8, rate=rate)


def traffic(rate):
    return WorkloadSpec(rate=rate, num_requests=1, vocab_size=10)


@pytest.mark.parametrize("take", [check_rate, workload, traffic])
def test_rates_without_sense_are_refused(take):
    for rate in (MIN_RATE, 0.5, 4.0, MAX_RATE):
        take(rate)
    for rate in (-1.0, 1e-300, MIN_RATE / 2, MAX_RATE * 2, 1e300, math.inf, -math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"requests a second make no traffic.*from 1e-05 .*to 1,000,000"):
            take(rate)


def test_a_plan_may_be_for_all_at_once():
    workload(0.0)
    with pytest.raises(ConfigError, match="or 0: all are there at once"):
        workload(1e-300)
    with pytest.raises(ConfigError, match=r"^0 requests a second make no traffic"):
        traffic(0.0)
