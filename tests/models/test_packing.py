"""Slab files from checkpoints: the bytes that the resident experts have, one expert at a time, resumable."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed import layout
from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.weight_memory import LaidOutMemory
from moeflow.checkpoint.packed.writer import partial_file
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.models import packing
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from moeflow.models.packing import names_in_part, pack_model, slab_spec
from moeflow.models.registry import read_model_config
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
CPU = torch.device("cpu")
INT8 = WeightFormats("int8", "int8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    checkpoint = open_checkpoint(folder)
    yield checkpoint
    checkpoint.close()


def slabs(index):
    spec = index.spec
    content = index.path.read_bytes()
    return [content[spec.offset(n) : spec.offset(n) + spec.slab_bytes] for n in range(spec.num_slabs)]


def resident(checkpoint, weight_format):
    model = load_model(checkpoint, PackedAllocator(torch.float32, CPU, WeightFormats(weight_format, weight_format)))
    return [row.numpy().tobytes() for layer in model.layers for row in layer.mlp.weights.storage]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_slabs_are_the_resident_experts_bytes(checkpoint, tmp_path, weight_format, num_threads):
    seen = []
    spec = pack_model(
        checkpoint,
        tmp_path / "slabs",
        WeightFormats(weight_format, weight_format),
        num_threads=num_threads,
        on_bytes=lambda *counts: seen.append(counts),
    )
    index = read_slab_index(tmp_path / "slabs")
    assert index.spec == spec
    assert (spec.num_layers, spec.num_experts) == (2, 4)
    assert slabs(index) == resident(checkpoint, weight_format)
    assert seen[-1] == (spec.content_bytes, spec.content_bytes)


def test_an_interrupted_packing_goes_on(checkpoint, tmp_path, monkeypatch):
    taken = []
    real_fill = packing.fill

    def fail_at_the_sixth(checkpoint, named, importance):
        taken.append(1)
        if len(taken) == 6:
            raise KeyboardInterrupt
        real_fill(checkpoint, named, importance)

    monkeypatch.setattr(packing, "fill", fail_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        pack_model(checkpoint, tmp_path / "slabs", INT8)
    assert not (tmp_path / "slabs").exists()
    assert partial_file(tmp_path / "slabs").exists()
    taken[:] = [1] * 6
    pack_model(checkpoint, tmp_path / "slabs", INT8)
    assert 6 < len(taken) < 6 + 8  # the first ones were found
    assert slabs(read_slab_index(tmp_path / "slabs")) == resident(checkpoint, "int8")


KILLED_PACKING = """
import sys, time
from pathlib import Path
from moeflow.checkpoint.open import open_checkpoint
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.checkpoint.packed import writer
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.packing import pack_model
writer._UNSETTLED_BYTES = 1  # every slab is settled
def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.02 if done < total // 2 else 60)
pack_model(open_checkpoint(sys.argv[1]), Path(sys.argv[2]), WeightFormats("int8", "int8"), on_bytes=slowly)
"""


@pytest.mark.slow
def test_a_packing_that_was_killed_goes_on(checkpoint, tmp_path):
    target = tmp_path / "slabs"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_PACKING, str(checkpoint.path), str(target)], stdout=subprocess.PIPE, text=True
    ) as process:
        while int(process.stdout.readline()) == 0:
            time.sleep(0.01)
        process.kill()
    assert not target.exists()
    counts = []
    pack_model(checkpoint, target, INT8, on_bytes=lambda done, _: counts.append(done))
    assert counts[0] > 0  # packing resumed from the written slabs
    assert slabs(read_slab_index(target)) == resident(checkpoint, "int8")


@pytest.mark.parametrize("weight_format", ["float32", "int8"])
def test_a_part_names_the_tensors_that_have_weights_in_it(checkpoint, monkeypatch, weight_format):
    monkeypatch.setattr(layout, "PIECE_BYTES", PAGE_BYTES)  # else all of a tiny model is one piece
    formats = WeightFormats(weight_format, weight_format)
    spec = slab_spec(checkpoint, formats)
    content = torch.zeros(spec.resident_bytes, dtype=torch.uint8)
    memory = LaidOutMemory(content.numpy(), is_filled=False)
    model = packing._build_resident(checkpoint, read_model_config(checkpoint), formats, memory)
    named = dict(model.named_weights())
    found = [set(names_in_part(checkpoint, formats, spec, part)) for part in range(spec.num_slabs, spec.num_parts)]
    assert set().union(*found) == set(named)
    for name, destination in named.items():
        before = content.clone()
        weight = torch.randn(tuple(destination.shape))
        if isinstance(destination, PackedRows):
            destination.fill(weight, np.arange(len(weight)))
        else:
            destination[:] = weight
        pages = (content != before).view(-1, PAGE_BYTES).any(dim=1).nonzero().flatten().tolist()
        assert pages
        assert all(name in found[page] for page in pages)
    assert max(map(len, found)) <= 3  # queries, keys and values share a block
    expert = names_in_part(checkpoint, formats, spec, spec.number(1, 3))
    assert expert == [f"model.layers.1.block_sparse_moe.experts.3.{matrix}.weight" for matrix in ("w1", "w3", "w2")]
