"""Observes whether copies to the GPU and its computing take place at once."""

from __future__ import annotations

import argparse

from moeflow.pipeline.catalog import OFFLOADING
from studies.gpu_check.findings import Findings
from studies.gpu_check.options import is_rehearsal
from studies.gpu_check.pipelines.models import HEADS, answers, pipeline_on, shaped
from studies.gpu_check.pipelines.timed_devices import Spans, at_once, merged, timed_devices

PROMPT_LENS = (5, 1, 12, 3) * 4
MICRO_BATCH = 4  # so that passes have four of them
MIDDLE = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "vocab_size": 512}


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Return for each pipeline how long the device copied, computed, and did both at once.

    `link_busy` is the share of the time from the first copy to the end of the last one.
    """
    widths = {name: MIDDLE[name] // options.middle for name in ("hidden_size", "intermediate_size")}
    folder = shaped(options.scratch / "middle", MIDDLE | HEADS | widths)
    dtype, lengths = ("float32", PROMPT_LENS[:5]) if is_rehearsal(options) else ("bfloat16", PROMPT_LENS)
    for name in OFFLOADING:
        with findings.of(name):
            with timed_devices() as devices:
                answers(pipeline_on(options, folder, name, dtype, MICRO_BATCH, 0.0), lengths)
            (device,) = devices
            found = _shares(*map(merged, device.spans()))
            findings.note(**{name: found})
            findings.row(name, f"{found['overlap']:.0%} overlap", f"link busy {found['link_busy']:.0%}")


def _shares(copied: Spans, computed: Spans) -> dict[str, float]:
    busy = [sum(end - start for start, end in spans) for spans in (copied, computed)]
    both = at_once(copied, computed)
    return {
        "copying_s": round(busy[0], 4),
        "computing_s": round(busy[1], 4),
        "both_s": round(both, 4),
        "overlap": round(both / min(busy), 3) if min(busy) else 0.0,
        "link_busy": round(busy[0] / (copied[-1][1] - copied[0][0]), 3),
    }
