"""The host's part of an exchange with a GPU: each row is measured, and an expert is computed only if it is present."""

from __future__ import annotations

import json

import pytest
import torch

from moeflow.kernels.cpu import extension
from studies import seam_host
from tests.studies.running import run

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.mark.slow  # starts a process
def test_every_row_is_measured():
    done = run("studies.seam_host", "--calls", "20", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert list(record["deciles_us"]) == list(record["least_us"])
    assert len(record["least_us"]) == 5
    for name, deciles in record["deciles_us"].items():
        assert len(deciles) == 9
        assert 0 < record["least_us"][name] <= deciles[0]
    assert seam_host.table(record).rows[0][-1] == "1.0"


@pytest.mark.parametrize("num_present", [0, 1])
def test_the_host_writes_the_sums_of_every_layer(num_present, monkeypatch):
    computed = []
    sums = seam_host.PresentExperts.sums

    def watched(experts, hidden, ids, weights, out):
        out.fill_(7.0)
        call = sums(experts, hidden, ids, weights, out)

        def run() -> None:
            call()
            computed.append(out.clone())

        return run

    monkeypatch.setattr(seam_host.PresentExperts, "sums", watched)
    assert len(seam_host.of_layer(3, 2, num_present)) == 3
    assert [tuple(each.shape) for each in computed] == [(2, seam_host.HIDDEN)] * 3
    assert all(torch.equal(each, torch.zeros_like(each)) for each in computed)
