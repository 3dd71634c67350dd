"""A pass that finds no memory ends its requests with an error that names remedies; later passes compute as ever."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.engine.engine import Engine
from moeflow.engine.pass_memory import explain
from moeflow.experts.hybrid.seam import Seam
from moeflow.kernels.cpu import extension
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from tests.engine.offload.offloaded_runs import answers, config, offloaded
from tests.engine.test_hybrid_engine import config_of
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())

LENGTHS = (20, 3)
CONFIGS = {
    "resident": lambda model: config(model, dtype="float32"),
    "offloaded": lambda model: offloaded(model, "cgopipe", 2, device="emulated:16MiB,1000,torch", dtype="float32"),
    "hybrid": lambda model: config_of(model, 2),
    "hybrid that streams": lambda model: config_of(model, 2, stream_tokens=10),
}
MIDDLES = {"offloaded": [(DecoderLayer, "post_attention", 1)], "hybrid": [(Seam, "send", 1), (Seam, "receive", 1)]}
REMEDIES = {"offloaded": "--micro-batch, --prompt-micro-batch", "hybrid": "--gpu-memory"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, vocab_size=512)
    return str(folder)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_engine_survives_a_pass_without_memory(model, monkeypatch, kind):
    """The allocator refuses at the end of a pass, or in the middle: at the second layer."""
    engine = Engine.load(CONFIGS[kind](model))
    try:
        expected, errors = answers(engine, LENGTHS)
        assert not errors
        for where, name, num_calls in ((CausalLM, "logits", 0), *MIDDLES.get(kind, ())):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, refused_after(num_calls, getattr(where, name)))
                _, errors = answers(engine, LENGTHS)
            assert len(errors) == len(LENGTHS)
            for error in errors:
                assert "finds no memory on cpu: take fewer tokens in a pass (--max-num-batched-tokens)" in error
                assert REMEDIES.get(kind.split()[0], "") in error
            assert answers(engine, LENGTHS) == (expected, [])
    finally:
        engine.close()


def refused_after(num_calls, healthy):
    """Return a function that computes so many times, and then finds no memory on a GPU."""
    left = iter(range(num_calls))

    def refused(*arguments):
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return healthy(*arguments)

    return refused


def test_remedies_are_those_of_a_gpu_with_the_whole_model(model):
    resident = dataclasses.replace(config(model), device="cuda:0")
    short, other = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError("illegal")
    with pytest.raises(CapacityError, match=r"of 7 tokens finds no memory on cuda:0: .*--kv-cache.*--gpu-memory"):
        explain(short, resident, 7)
    explain(other, resident, 7)
