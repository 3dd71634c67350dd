"""Attention on the host and the transfer of its keys and values: every case is measured, bytes are those of KV."""

from __future__ import annotations

import json

from click.testing import CliRunner

from studies import attention_places


def test_every_case_is_measured_and_a_slow_link_makes_fetching_slow():
    given = ["--micro-batch", "2", "--micro-batch", "5", "--context", "20", "--threads", "1", "--json"]
    done = CliRunner().invoke(attention_places.main, ["mixtral-8x7b", "--device", "emulated:64MiB,0.01", *given])
    assert not done.exception, (done.output, done.exception)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(record["micro_batch"], record["context"]) for record in records] == [(2, 20), (5, 20)]
    for record in records:
        assert record["kv_bytes"] == record["micro_batch"] * 2 * 16 * 2 * 8 * 128 * 2  # blocks of K and V in bfloat16
        assert record["fetch_ms"] >= record["kv_bytes"] / 1e7 * 1000 - 1.0  # what a burst may hide
        assert record["attend_ms"] > 0
