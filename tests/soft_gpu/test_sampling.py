"""Every way to sample on the GPU in software: the processor's tokens, and one wait a pass, with token trees, too."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from tests.soft_gpu.test_families import printed_by


@pytest.mark.slow
def test_a_pass_waits_once_whatever_requests_ask_for() -> None:
    found = printed_by("run_sampling", ())
    assert set(found) == {"plain", "trees"}
    for name, counts in found.items():
        assert not counts["different"], name
        assert len(counts["passes"]) > 3
        assert any(one["num_drafted"] for one in counts["passes"]) == (name == "trees")
        for one in counts["passes"]:
            assert sum(one["synchronizations"].values()) == 1, (name, one)
            assert not one["pageable_copies"], (name, one)
