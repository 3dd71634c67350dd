"""Routers stay as the file has them, from the decision to the memory that kernels read, packed on disk or not."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine.runner_loading import load_runner
from moeflow.kernels.arrays import as_tensor
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.checkpoint.tiny_models import EXPERTS, HIDDEN, LAYERS, random_weights, write_gguf

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
NAMES = [f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in range(LAYERS)]


def write(folder, kind, routers):
    return write_gguf(folder / f"{kind.name}-{routers.name}.gguf", "mixtral", random_weights("mixtral"), kind, routers)


def loaded_routers(config):
    with closing(load_runner(config)) as runner:
        return [layer.mlp.router for layer in runner._model.layers]


@pytest.mark.parametrize(
    ("kind", "routers", "want"),
    [
        (Kind.BF16, Kind.F32, ("bfloat16", "float32")),
        (Kind.BF16, Kind.BF16, ("bfloat16", "bfloat16")),
        (Kind.Q8_0, Kind.F32, ("int8", "float32")),
        (Kind.Q4_1, Kind.F32, ("int4-min", "float32")),
    ],
)
def test_no_bit_of_a_router_is_lost(tmp_path, kind, routers, want):
    file = write(tmp_path, kind, routers)
    settings = Settings(model=str(file), device="cpu", num_threads=1, cache_dir=tmp_path, kv_cache_bytes=2**20)
    config = resolve(settings).config
    assert (config.weight_format, config.router_format) == want
    with closing(open_checkpoint(file)) as checkpoint:
        stored = [checkpoint.read(name).float() for name in NAMES]
    assert all(map(torch.equal, [as_tensor(router.unpack()) for router in loaded_routers(config)], stored))
    index = pack(str(file), None, cache_dir=tmp_path)
    packed = resolve(settings).config
    assert packed.packed_file == str(index.path)
    assert all(map(torch.equal, [as_tensor(router.unpack()) for router in loaded_routers(packed)], stored))


def test_files_with_routers_of_both_kinds_are_told_apart(tmp_path):
    """The routers of tiny models take a page in either format: sizes alone do not tell whose file it is."""
    file = write(tmp_path, Kind.BF16, Kind.F32)
    exact = pack(str(file), None, cache_dir=tmp_path).spec
    write_gguf(file, "mixtral", random_weights("mixtral"), Kind.BF16)
    narrow = pack(str(file), None, cache_dir=tmp_path).spec
    assert exact.resident_bytes == narrow.resident_bytes
    assert exact.layout != narrow.layout


def test_estimates_count_routers_as_they_are_kept(tmp_path):
    num_bytes = {}
    for routers in (Kind.F32, Kind.BF16):
        file = write(tmp_path, Kind.BF16, routers)
        config = resolve(Settings(model=str(file), device="cpu", num_threads=1, memory_bytes=2**34)).config
        with closing(open_checkpoint(file)) as checkpoint:
            stored = sum(info.num_bytes for info in checkpoint.tensors.values())
        num_bytes[routers] = config.memory.weight_bytes
        assert num_bytes[routers] == stored  # norms are stored in float32
    assert num_bytes[Kind.F32] - num_bytes[Kind.BF16] == 2 * LAYERS * EXPERTS * HIDDEN
