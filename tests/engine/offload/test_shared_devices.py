"""Two devices that are smaller than the model share its layers, and give the plain run's tokens.

The ranks are threads, and gloo adds up.
"""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.kernels.cpu import extension
from moeflow.pipeline.catalog import OFFLOADING
from tests.engine.offload.offloaded_runs import FAMILIES, config, offloaded, run
from tests.engine.ranks.conftest import in_threads
from tests.models.parity import random_model
from tests.tiny_mixtral import write_tiny_mixtral

__all__ = ["in_threads"]  # a fixture

DEVICE = "emulated:16MiB,1000,torch"
LENGTHS = (5, 1, 60, 17)
SHARED = ("heads that differ, normalised values", "llama", "one layer", "shared experts", "dense layers")
pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=5, num_hidden_layers=3)
    return str(folder)


@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_tokens_are_those_of_the_plain_run(model, in_threads, pipeline):
    expected = run(config(model), LENGTHS)
    found = run(offloaded(model, pipeline, 3, 0.4, DEVICE, num_ranks=2), LENGTHS)
    assert found == expected


@pytest.mark.parametrize("family", SHARED)
def test_families_run(tmp_path, in_threads, family):
    random_model(FAMILIES[family]).save_pretrained(tmp_path)
    expected = run(config(str(tmp_path)), LENGTHS)
    assert run(offloaded(str(tmp_path), "cgopipe", 2, device=DEVICE, num_ranks=2), LENGTHS) == expected


def test_a_model_that_normalises_all_heads_together_is_refused(tmp_path, in_threads):
    random_model(FAMILIES["olmoe"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"2 ranks .* \(olmoe\) .* all heads. Use one rank"):
        run(offloaded(str(tmp_path), "cgopipe", 2, device=DEVICE, num_ranks=2), LENGTHS)


@pytest.mark.parametrize(
    ("device", "settings", "complaint"),
    [
        ("emulated:16MiB,1000", {"num_ranks": 2}, r"2 ranks .* compute in torch: add it"),
        (DEVICE, {"num_ranks": 3}, "3 ranks .* do not divide by 3. Use fewer"),
        (DEVICE, {"num_ranks": 2, "expert_layout": "expert"}, "--expert-layout expert is not for devices"),
    ],
)
def test_what_devices_cannot_share_is_refused_with_what_to_do(model, device, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        offloaded(model, "cgopipe", 3, device=device, **settings)
