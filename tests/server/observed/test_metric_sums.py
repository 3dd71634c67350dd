"""Counts of several processes as one exposition: compared with one registry that has counted everything."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from moeflow.server.metric_sums import Count, MetricSums, counts_of

STEPS = st.tuples(st.integers(0, 2), st.sampled_from(["a", "b"]), st.sampled_from([0.5, 1.0, 3.0]), st.booleans())


class Process:
    """What one process counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("requests", "by path", ["path"], registry=self.registry)
        self._times = Histogram("times", "of all", buckets=(1, 2), registry=self.registry)
        Gauge("now", "of this process", registry=self.registry).set(7)

    def note(self, path: str, time_s: float) -> None:
        self._requests.labels(path).inc()
        self._times.observe(time_s)

    def counts(self) -> list[Count]:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(counts_of(self.registry.collect())), type=list[Count])


def values(metrics: list[Metric]) -> dict[tuple[object, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for metric in metrics
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(STEPS))
def test_sums_are_those_of_one_process(steps):
    whole, own, sums = Process(), Process(), MetricSums()
    others = {1: Process(), 2: Process()}
    for process, path, time_s, dies in steps:
        whole.note(path, time_s)
        (others.get(process) or own).note(path, time_s)
        if process:
            sums.note(process, others[process].counts())
        if process and dies:
            sums.end(process)
            others[process] = Process()
    assert values(list(sums.added_to(own.registry.collect()))) == pytest.approx(values(list(whole.registry.collect())))
