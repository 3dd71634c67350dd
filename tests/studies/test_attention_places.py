"""Attention on the host and the transfer of its keys and values: every case is measured, bytes are those of KV."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from studies import attention_places
from studies.report.__main__ import write_places


def test_every_case_is_measured_and_a_slow_link_makes_fetching_slow(tmp_path):
    given = ["--micro-batch", "2", "--micro-batch", "5", "--context", "20", "--context", "50", "--threads", "1"]
    given += ["--turns", "2", "--json"]
    done = CliRunner().invoke(attention_places.main, ["mixtral-8x7b", "--device", "emulated:64MiB,0.01", *given])
    assert not done.exception, (done.output, done.exception)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [(2, 20, 2), (2, 50, 4), (5, 20, 2), (5, 50, 4)]
    for record, (micro_batch, context, num_blocks) in zip(records, cases, strict=True):
        assert (record["micro_batch"], record["context"]) == (micro_batch, context)
        assert record["kv_bytes"] == micro_batch * num_blocks * 16 * 2 * 8 * 128 * 2  # K and V in bfloat16
        assert all(len(record[f"{name}_ms"]) == 2 for name in ("attend", "gather", "cross"))
        assert record["link_ms"] == pytest.approx(record["kv_bytes"] / 1e7 * 1000, abs=0.001)
        assert min(record["cross_ms"]) >= record["kv_bytes"] / 1e7 * 1000 - 1.0  # what a burst may hide
        assert min(record["attend_ms"]) > 0
    text = write_places(records, tmp_path)
    assert (tmp_path / "images" / "attention-places-1.png").stat().st_size > 10_000
    assert "| 5 x 50 | 1 MiB |" in text


def record(attend_ms, gather_ms, cross_ms, link_ms=0.0):
    times = {"attend_ms": attend_ms, "gather_ms": gather_ms, "cross_ms": cross_ms}
    about = {"shape": "m", "device": "d", "micro_batch": 2, "context": 8, "machine": {"threads": 2}}
    return {**about, **times, "link_ms": link_ms, "kv_bytes": 10**7, "read_bytes_per_s": 2e10}


def test_a_fetch_is_both_steps_and_late_copies_are_told():
    found = attention_places.table([record([1.0, 2.0, 1.0], [1.0, 2.0, 3.0], [4.0, 2.0, 3.0])])
    (row,) = found.rows
    assert attention_places.fetch_ms(record([1.0], [1.0, 2.0], [4.0, 2.5])) == [5.0, 4.5]
    assert row[3] == "50%"  # 10 GB/s of 20
    assert float(row[6]) == pytest.approx(10 / 3, abs=0.1)
    assert row[7] == "5.00"
    assert len(found.notes) == 1
    late, exact = (attention_places.table([record([1.0], [1.0], [1.0], link)]).notes for link in (0.5, 0.95))
    assert "up to 2.0 times" in late[1]
    assert len(exact) == 1
