"""Small packed weights files, whose slabs say whose they are."""

from __future__ import annotations

import random
from pathlib import Path

from moeflow.checkpoint.packed.layout import SlabIndex, SlabSpec, read_slab_index
from moeflow.checkpoint.packed.writer import build_packed_weights_file


def make_spec(**changes) -> SlabSpec:
    """By default, layers' slabs have three sizes."""
    is_usual = not changes.keys() & {"num_layers", "slab_bytes"}
    fields = {
        "identity": "a model",
        "weight_format": "int8",
        "embedding_format": "int8",
        "num_layers": 3,
        "num_experts": 4,
        "slab_bytes": 5000,
        "slab_bytes_of_layers": (4096, 5000, 3001) if is_usual else (),
        "resident_bytes": 0,
        "layout": "as built",
    }
    return SlabSpec(**{**fields, **changes})


def slab(spec: SlabSpec, layer: int, expert: int) -> bytes:
    """What an expert's slab holds in tests: noise of its own."""
    return random.Random(f"{layer} {expert}").randbytes(spec.layer_bytes[layer])


def resident(spec: SlabSpec) -> bytes:
    """What the weights outside of slabs are in tests: noise."""
    return random.Random("resident").randbytes(spec.resident_bytes)


def write_packed_weights_file(file: Path, spec: SlabSpec) -> SlabIndex:
    with build_packed_weights_file(file, spec) as writer:
        for layer, expert in writer.missing():
            writer.write(layer, expert, memoryview(slab(spec, layer, expert)))
        writer.write_resident(memoryview(resident(spec)))
    return read_slab_index(file)


def flip_bit(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 4]))
