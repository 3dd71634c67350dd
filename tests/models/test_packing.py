"""Slab files from checkpoints: the bytes that the resident experts have, one expert at a time, resumable."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.kernels import cpu
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.layers.placement import Placement, WeightFormats
from moeflow.memory.slab_file import read_slab_index
from moeflow.memory.slab_writer import partial_file
from moeflow.models import packing
from moeflow.models.loading import load_model
from moeflow.models.packing import pack_model
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=cpu.why_not())
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
    model = load_model(checkpoint, Placement(torch.float32, CPU, WeightFormats(weight_format, weight_format)))
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

    def fail_at_the_sixth(checkpoint, named):
        taken.append(1)
        if len(taken) == 6:
            raise KeyboardInterrupt
        real_fill(checkpoint, named)

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
from moeflow.layers.placement import WeightFormats
from moeflow.memory import slab_writer
from moeflow.layers.placement import WeightFormats
from moeflow.models.packing import pack_model
slab_writer._UNSETTLED_BYTES = 1  # every slab is settled
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
    assert counts[0] > 0  # what was written was found
    assert slabs(read_slab_index(target)) == resident(checkpoint, "int8")
