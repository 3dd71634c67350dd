"""The table that embeds tokens for each layer is in memory, or stays in the packed weights that are mapped."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.kernels.cpu import extension
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.packing import layer_table_range
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.models.parity import load, random_model
from tests.models.test_gemma4_text import CONFIGS

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
TABLE_BYTES = 4 * 101 * 6 * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phone")
    random_model(CONFIGS["for phones"]).save_pretrained(folder)
    return str(folder)


def plan(folder, cache_dir):
    made = resolve(Settings(model=folder, dtype="float32", cache_dir=cache_dir))
    with closing(open_checkpoint(folder)) as checkpoint:
        return made, costs_of(read_model_config(checkpoint), made.config)


def test_it_is_in_memory_until_weights_are_packed(folder, tmp_path):
    made, costs = plan(folder, tmp_path)
    assert "in memory" in dict(made.plan.reasons)["layer embeddings"]
    pack(folder, None, dtype="float32", cache_dir=tmp_path)
    packed, packed_costs = plan(folder, tmp_path)
    assert packed.config.packed_file
    assert "stay on disk" in dict(packed.plan.reasons)["layer embeddings"]
    assert costs.model_bytes - packed_costs.model_bytes == costs.layer_table_bytes == TABLE_BYTES


def test_its_place_in_the_file_is_where_its_bytes_are(folder, tmp_path):
    pack(folder, None, dtype="float32", cache_dir=tmp_path)
    file = Path(plan(folder, tmp_path)[0].config.packed_file)
    formats = WeightFormats("float32", "float32")
    with closing(open_checkpoint(folder)) as checkpoint:
        place = layer_table_range(checkpoint, formats, read_slab_index(file).spec)
    table = load(folder, packed=formats).embed_layers._table.storage.numpy().tobytes()
    assert file.read_bytes()[place.start : place.start + len(table)] == table
    assert len(table) <= len(place) < len(table) + 4096
