"""Settings of files that an engine writes about its work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeflow.settings.option import setting

_setting = partial(setting, group="Diagnostics")


@dataclass(frozen=True, kw_only=True)
class DiagnosticSettings:
    """Files for routing, trace and task graph."""

    record_routing: Path | None = _setting(
        "--record-routing",
        "new file",
        "Append the experts that each token used to this file, for `moeflow simulate cache`.",
    )
    trace_file: Path | None = _setting(
        "--trace",
        "new file",
        "Write a trace of computing, reading and waiting at the end, for ui.perfetto.dev.",
    )
    graph_file: Path | None = _setting(
        "--graph",
        "new file",
        "Write the tasks of the last pass, and what each waited for, at the end, for GraphViz.",
    )
