"""Which slab file belongs to a model: made where it is missing, found where it is, refused if it is another's."""

from __future__ import annotations

import pytest

from moeflow.core.errors import ConfigError
from moeflow.engine.slab_files import pack
from moeflow.kernels import cpu
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=cpu.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


def test_each_format_has_a_file_of_its_own_in_the_cache_folder(model, tmp_path):
    int8 = pack(model, None, cache_dir=tmp_path, quantize="int8")
    own = pack(model, None, cache_dir=tmp_path)
    assert (int8.spec.weight_format, own.spec.weight_format) == ("int8", "float32")
    assert sorted((tmp_path / "experts").iterdir()) == sorted([int8.path, own.path])
    written = int8.path.stat().st_mtime_ns
    assert pack(model, None, cache_dir=tmp_path, quantize="int8") == int8
    assert int8.path.stat().st_mtime_ns == written


def test_the_file_of_another_model_or_format_is_refused(model, tmp_path):
    pack(model, tmp_path / "mine", cache_dir=None, quantize="int8")
    with pytest.raises(ConfigError, match="in int8 instead of int4"):
        pack(model, tmp_path / "mine", cache_dir=None, quantize="int4")


def test_a_dense_model_has_nothing_to_pack(tmp_path):
    write_tiny_llama(tmp_path / "dense")
    with pytest.raises(ConfigError, match="dense"):
        pack(str(tmp_path / "dense"), None, cache_dir=tmp_path)
