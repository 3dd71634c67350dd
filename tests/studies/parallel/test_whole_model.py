"""Whole models whose layers with experts are those of a study's arm, as threads, against all experts in one process."""

from __future__ import annotations

import pytest

from moeflow.kernels.cpu import extension
from studies.parallel.paper import ARMS, DROPLESS
from studies.parallel.whole_model import ModelTask, WholeModel
from tests.parallel.thread_group import run_ranks
from tests.studies.parallel.cases import case, shape, weights_of

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="needs the CPU extension")

LENGTH = 20
LAYER = shape(num_ranks=2, num_experts=5, top_k=1, hidden=64, width=48, is_gated=False)
UNEQUAL = case(LAYER, num_tokens=(2 * LENGTH, LENGTH), num_experts_skew=1, capacity_factor=1.0)


@pytest.mark.parametrize("router", ["skewed", "own"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_each_arm_computes_a_model_of_ranks_with_unequal_batches(router, num_steps):
    def work(group):
        model = WholeModel(LAYER, 4, has_decoder=num_steps > 0, group=group)
        tasks = {arm: ModelTask(UNEQUAL, arm, 4, LENGTH, num_steps, router, is_checked=True) for arm in ARMS}
        return {arm: model.run(task, shared) for arm, task in tasks.items()}

    with weights_of(LAYER) as shared:
        runs = run_ranks(2, work)
    for of_rank in runs:
        for arm, run in of_rank.items():
            assert len(run.encoder) == 2
            assert [len(layers) for layers in run.decoder] == [2] * num_steps
            if arm in DROPLESS:
                assert run.error < 1e-5, arm
    if router == "skewed":  # 0.6 of the tokens go to one expert, whose capacity is a fifth
        assert max(of_rank["deepspeed"].error for of_rank in runs) > 1e-4
