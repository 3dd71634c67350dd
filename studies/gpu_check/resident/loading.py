"""Times how weights get from a file that main memory caches onto the GPU, and how long graphs take to capture."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from unittest import mock

from moeflow.core.graph_sizes import SIZES
from moeflow.engine import decode_graphs
from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.layers import folder_of, free, layer_counts, load
from studies.gpu_check.resident.target import Target


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note seconds and GB/s of a model with eight layers."""
    target = Target(options)
    folder = folder_of(target, options.scratch, max(layer_counts(target)))
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    first_s, eager_s, with_graphs_s = (_load_s(target, folder, has_graphs) for has_graphs in (False, False, True))
    findings.note(
        num_bytes=num_bytes,
        first_s=round(first_s, 3),
        again_s=round(eager_s, 3),
        gb_per_s=round(num_bytes / eager_s / 1e9, 3),
        with_graphs_s=round(with_graphs_s, 3),
    )
    findings.row("weights", f"{num_bytes / eager_s / 1e9:.2f} GB/s", f"{num_bytes / 1e9:.1f} GB in {eager_s:.1f} s")
    findings.row("graphs", f"{max(with_graphs_s - eager_s, 0.0):.1f} s", f"{len(SIZES)} sizes, to capture")


def _load_s(target: Target, folder: Path, has_graphs: bool) -> float:
    start = time.perf_counter()
    patch = mock.patch.object(decode_graphs, "can_capture", wraps=decode_graphs.can_capture)
    with target.models(), patch as can_capture:
        if not has_graphs:
            can_capture.return_value = False
        engine = load(target, folder, max_num_seqs=2 if target.is_rehearsal else 64, max_tokens=64)
        target.wait()
        seconds = time.perf_counter() - start
        engine.close()
    del engine
    free(target)
    return seconds
