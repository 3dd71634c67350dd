"""Traces as written and read; a torn or damaged end costs its own passes and nothing else."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.workload.routing_recorder import RoutingRecorder
from moeflow.workload.routing_trace import TextShare, TraceHeader, encode_header, read_routing_trace


def make_header(**changes):
    return TraceHeader(**{"identity": "a model", "num_layers": 3, "num_experts": 8, "top_k": 2, **changes})


def make_passes(header, count, seed=0):
    chance = np.random.default_rng(seed)
    return [make_pass(header, chance, number) for number in range(count)]


def make_pass(header, chance, number):
    """Return experts [layers, tokens, K], those by routers ahead or None, texts, and a number."""
    shape = (header.num_layers, int(chance.integers(0, 6)), header.top_k)
    num_ahead = int(chance.integers(0, 4))
    ids = chance.integers(0, header.num_experts, shape)
    ahead = chance.integers(0, header.num_experts, (shape[0], num_ahead, *shape[1:])) if num_ahead else None
    texts = []
    for text in range(int(chance.integers(0, 3))):
        known_from, start, stop = sorted(map(int, chance.integers(0, 40, 3)))
        token_ids = chance.integers(0, 2**31, stop - known_from).tolist()
        texts.append(TextShare(text, known_from, start, stop, stop - start + number, token_ids))
    return ids, ahead, texts, number


def write_pass(recorder, one):
    ids, ahead, texts, number = one
    recorder.begin_pass(texts)
    for layer, of_layer in enumerate(ids):
        recorder.add_layer(of_layer, None if ahead is None else ahead[layer])
    recorder.end_pass(num_generated=number, compute_s=number / 4)


def record(path, header, passes):
    recorder = RoutingRecorder(path, header)
    for one in passes:
        write_pass(recorder, one)
    recorder.close()


def check(trace, passes):
    assert len(trace.passes) == len(passes)
    for routed, (ids, ahead, texts, number) in zip(trace.passes, passes, strict=True):
        assert np.array_equal(routed.ids, ids)
        assert (routed.ahead is None) == (ahead is None)
        assert ahead is None or np.array_equal(routed.ahead, ahead)
        assert list(routed.texts) == texts
        assert (routed.num_generated, routed.compute_s) == (number, number / 4)


@pytest.mark.parametrize(("num_experts", "itemsize"), [(256, 1), (257, 2), (60_000, 2)])
def test_what_is_recorded_is_read(tmp_path, num_experts, itemsize):
    header = make_header(num_experts=num_experts)
    passes = make_passes(header, 20)
    record(tmp_path / "new" / "routing", header, passes)
    trace = read_routing_trace(tmp_path / "new" / "routing")
    assert (trace.header, trace.dropped_bytes) == (header, 0)
    assert trace.passes[0].ids.dtype.itemsize == itemsize
    check(trace, passes)


def test_another_run_appends(tmp_path):
    header, file = make_header(), tmp_path / "routing"
    first, second = make_passes(header, 5), make_passes(header, 5, seed=1)
    record(file, header, first)
    record(file, header, second)
    check(read_routing_trace(file), first + second)


@given(cut=st.integers(1, 900))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_torn_end_is_left_out_and_cut_off_by_the_next_run(tmp_path, cut):
    header, file = make_header(), tmp_path / "routing"
    file.unlink(missing_ok=True)
    passes, more = make_passes(header, 9), make_passes(header, 3, seed=1)
    record(file, header, passes)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(max(size - cut, 0))
    try:
        trace = read_routing_trace(file)
    except ConfigError:  # cut in the description
        left = 0
    else:
        left = len(trace.passes)
        assert left < len(passes)
        check(trace, passes[:left])
    record(file, header, more)
    trace = read_routing_trace(file)
    assert trace.dropped_bytes == 0
    check(trace, passes[:left] + more)


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_never_gives_a_wrong_pass(tmp_path, data):
    header, file = make_header(), tmp_path / "routing"
    file.unlink(missing_ok=True)
    passes = make_passes(header, 9)
    record(file, header, passes)
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        trace = read_routing_trace(file)
    except ConfigError:
        return
    assert trace.dropped_bytes > 0
    check(trace, passes[: len(trace.passes)])


def test_a_pass_that_did_not_end_is_not_written(tmp_path):
    header, file = make_header(num_layers=2), tmp_path / "routing"
    recorder = RoutingRecorder(file, header)
    recorder.add_layer(np.zeros((1, 2), int))
    recorder.drop_pass()
    recorder.add_layer(np.zeros((1, 2), int))
    recorder.end_pass(num_generated=1, compute_s=0)
    recorder.close()
    assert read_routing_trace(file).passes == []


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    header, file = make_header(num_layers=1), tmp_path / "routing"
    recorder = RoutingRecorder(file, header)
    write, room = os.write, [2]

    def write_while_there_is_room(descriptor, data):
        room[0] -= 1
        if room[0] < 0:
            write(descriptor, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_while_there_is_room)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            recorder.add_layer(np.ones((3, 2), int))
            recorder.end_pass(num_generated=1, compute_s=0)
    assert [r.getMessage() for r in caplog.records] == [
        f"routing is recorded no longer: {file}: [Errno 28] No space left on device"
    ]
    trace = read_routing_trace(file)
    assert (len(trace.passes), trace.dropped_bytes) == (2, 5)


def test_files_of_others_are_refused(tmp_path):
    header, file = make_header(), tmp_path / "routing"
    with pytest.raises(ConfigError, match="cannot read"):
        read_routing_trace(file)
    file.write_bytes(b"something else entirely")
    with pytest.raises(ConfigError, match="is no trace of routing"):
        read_routing_trace(file)
    with pytest.raises(ConfigError, match="is no trace of routing"):
        RoutingRecorder(file, header)
    file.unlink()
    recorder = RoutingRecorder(file, header)
    with pytest.raises(ConfigError, match="another process is recording"):
        RoutingRecorder(file, header)
    recorder.close()
    with pytest.raises(ConfigError, match="another model"):
        RoutingRecorder(file, make_header(identity="another"))
    with pytest.raises(ConfigError, match=r"cannot write .*--record-routing"):
        RoutingRecorder(file / "below", header)


@pytest.mark.parametrize(
    ("change", "complaint"), [({"format_version": 1}, "is of version 1"), ({"top_k": 0}, "without experts")]
)
def test_headers_that_make_no_sense_are_refused(tmp_path, change, complaint):
    file = tmp_path / "routing"
    file.write_bytes(encode_header(make_header(**change)))
    with pytest.raises(ConfigError, match=complaint):
        read_routing_trace(file)


@pytest.mark.slow
def test_a_killed_run_keeps_all_passes_that_had_ended(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from moeflow.workload.routing_recorder import RoutingRecorder
        from tests.workload.test_routing_trace import make_header, make_passes, write_pass
        recorder = RoutingRecorder(Path(sys.argv[1]), make_header())
        for one in make_passes(make_header(), 7):
            write_pass(recorder, one)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    file = tmp_path / "routing"
    command = [sys.executable, "-c", textwrap.dedent(code), str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    check(read_routing_trace(file), make_passes(make_header(), 7))
