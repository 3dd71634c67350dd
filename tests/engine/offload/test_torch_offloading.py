"""Devices that compute in torch, emulated by this machine, give the plain run's tokens and logits."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from moeflow.core.errors import ConfigError
from moeflow.engine.runner_loading import load_runner
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.offload.offloaded_runs import FAMILIES, Served, config, offloaded, run, sharing
from tests.models.parity import SEQUENCES, in_mixed_passes, load, random_model
from tests.tiny_mixtral import write_tiny_mixtral

DEVICE = "emulated:16MiB,1000,torch"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=5, num_hidden_layers=3)
    return str(folder)


@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_tokens_are_those_of_the_plain_run(model, pipeline):
    expected = run(config(model))
    for micro_batch, share in ((3, 0.4), (5, 1.0), (1000, 0.0)):
        assert run(offloaded(model, pipeline, micro_batch, share, DEVICE)) == expected


@pytest.mark.parametrize(("num_hosted", "share"), [(1, 0.4), (5, 0.0)])
def test_tokens_are_the_same_where_the_host_computes_experts(model, num_hosted, share):
    expected = run(config(model))
    assert run(sharing(offloaded(model, "cgopipe", 3, share, DEVICE), num_hosted)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_run(tmp_path, family):
    random_model(FAMILIES[family]).save_pretrained(tmp_path)
    expected = run(config(str(tmp_path)))
    for pipeline in ("cgopipe", "flexgen", "zero-inference"):
        assert run(offloaded(str(tmp_path), pipeline, 2, device=DEVICE)) == expected


def logits_of(folder, pipeline, dtype):
    settings = {"device": DEVICE, "pipeline": pipeline, "micro_batch": 4, "resident_experts": 0.4, "dtype": dtype}
    chosen = resolve(Settings(model=folder, max_model_len=64, num_threads=1, **settings)).config
    kept_as = "float32" if dtype == "float32" else "bfloat16"  # the host attends: its kernels have no float16
    assert (chosen.dtype, chosen.kv_dtype) == (dtype, kept_as)
    limits = replace(chosen.scheduler, num_blocks=64)
    with closing(load_runner(replace(chosen, scheduler=limits))) as runner:
        return in_mixed_passes(Served(runner), SEQUENCES, block_size=16)


@pytest.mark.parametrize("pipeline", ["cgopipe", "flexgen", "zero-inference"])
def test_logits_are_those_of_torch_alone(tmp_path, pipeline):
    random_model(FAMILIES["dense layers"]).save_pretrained(tmp_path)
    expected = in_mixed_passes(load(tmp_path), SEQUENCES)
    for name, logits in logits_of(str(tmp_path), pipeline, "float32").items():
        torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("pipeline", ["cgopipe", "flexgen", "zero-inference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_errs_no_more_than_torch_alone(tmp_path, pipeline, dtype):
    random_model(copy.deepcopy(FAMILIES["olmoe"])).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    exact = in_mixed_passes(load(tmp_path), SEQUENCES)
    plain = in_mixed_passes(load(tmp_path, torch.bfloat16), SEQUENCES)
    got = logits_of(str(tmp_path), pipeline, dtype)
    allowed = torch.cat([(plain[name] - exact[name]).abs() for name in exact]).median()
    error = torch.cat([(got[name] - exact[name]).abs() for name in exact]).median()
    assert 0 < error < 1.5 * allowed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("pipeline", OFFLOADING)
def test_a_gpu_gives_the_tokens_of_the_plain_run(model, pipeline):
    expected = run(config(model))
    for micro_batch, share in ((3, 0.4), (1, 0.0), (1000, 1.0)):
        assert run(offloaded(model, pipeline, micro_batch, share, "cuda:2GiB")) == expected


def test_only_experts_wait_in_main_memory(model):
    settings = {"device": DEVICE, "pipeline": "cgopipe", "resident_experts": 0.4}
    chosen = resolve(Settings(model=model, max_model_len=64, num_threads=1, **settings)).config
    with closing(load_runner(chosen)) as runner:
        purposes = runner._model.device.memory._purposes
        weights = load(model)
    experts = 3 * 5 * 3 * 32 * 48 * 4  # layers, experts, matrices
    outside = sum(weight.nbytes for name, weight in weights.named_weights() if "experts" not in name)
    assert purposes["experts that stay"] == experts * 2 // 5
    assert purposes["two layers' streamed weights"] == experts // 3 * 2 * 3 // 5
    assert purposes["weights outside of experts"] == outside


def test_what_only_kernels_hold_is_refused(model):
    with pytest.raises(ConfigError, match="--quantize does not go with a GPU that is smaller"):
        resolve(Settings(model=model, device=DEVICE, quantize="int4"))
