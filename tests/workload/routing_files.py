"""Routing as `--record-routing` writes it, made of a trace in memory."""

from __future__ import annotations

from moeflow.workload.routing_recorder import RoutingRecorder


def write_trace(file, trace):
    recorder = RoutingRecorder(file, trace.header)
    for one in trace.passes:
        for number, layer in enumerate(one.ids):
            recorder.add_layer(layer, None if one.ahead is None else one.ahead[number])
        recorder.end_pass(num_generated=one.num_generated, compute_s=one.compute_s)
    recorder.close()
    return file
