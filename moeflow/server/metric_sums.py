"""Adds up counts of several processes of one server: of living and of ended ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

_ADDITIVE = ("counter", "histogram")

Series = tuple[str, str, tuple[tuple[str, str], ...]]  # the metric, a sample's name, its labels


class Count(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a metric that only grows."""

    metric: str
    name: str
    labels: dict[str, str]
    value: float

    @property
    def series(self) -> Series:
        """The sample, without its value."""
        return self.metric, self.name, tuple(sorted(self.labels.items()))


def counts_of(metrics: Iterable[Metric]) -> list[Count]:
    """Return the samples of metrics that only grow, without zeros."""
    return [
        Count(metric.name, sample.name, sample.labels, sample.value)
        for metric in metrics
        if metric.type in _ADDITIVE
        for sample in metric.samples
        if sample.value and not sample.name.endswith("_created")
    ]


class MetricSums:
    """The counts of other processes."""

    def __init__(self) -> None:
        self._ended: dict[Series, float] = defaultdict(float)
        self._living: dict[int, list[Count]] = {}  # by the process

    def note(self, process: int, counts: list[Count]) -> None:
        """A process has counted so far."""
        self._living[process] = counts

    def end(self, process: int) -> None:
        """A process has ended; another one with its number begins from zero."""
        for count in self._living.pop(process, ()):
            self._ended[count.series] += count.value

    def added_to(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """Yield this process's metrics with the others' counts."""
        sums = defaultdict(float, self._ended)
        for counts in self._living.values():
            for count in counts:
                sums[count.series] += count.value
        by_metric: dict[str, dict[Series, float]] = defaultdict(dict)
        for series, value in sums.items():
            by_metric[series[0]][series] = value
        for metric in metrics:
            others = by_metric.get(metric.name, {})
            metric.samples = [_with(sample, others, metric.name) for sample in metric.samples]
            metric.samples += [Sample(name, dict(labels), value) for (_, name, labels), value in others.items()]
            yield metric


def _with(sample: Sample, others: dict[Series, float], metric: str) -> Sample:
    """Return a sample with what the others have of it, which is taken from them."""
    added = others.pop(Count(metric, sample.name, sample.labels, 0.0).series, 0.0)
    return sample._replace(value=sample.value + added) if added else sample
