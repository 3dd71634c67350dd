"""Which version of moeflow answers, for clients and for Prometheus."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from prometheus_client.core import InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


def version() -> str:
    """Return the version of the installed package."""
    return importlib.metadata.version("moeflow")


class BuildCollector(Collector):
    """Tells versions as labels."""

    def collect(self) -> Iterator[Metric]:
        """Yield one metric, `moeflow_build_info`."""
        labels = {"version": version(), "python": platform.python_version(), "machine": platform.machine()}
        yield InfoMetricFamily("moeflow_build", "Versions of this server", value=labels)
