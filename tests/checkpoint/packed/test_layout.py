"""The file as written and read back; whatever is damaged in its first pages is found and named."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import PIECE_BYTES, encode_header, is_packed_weights_file, read_slab_index
from moeflow.core.errors import CheckpointError
from tests.checkpoint.packed.slabs import flip_bit, make_spec, resident, slab, write_packed_weights_file


@given(
    num_experts=st.integers(1, 5),
    resident_pages=st.sampled_from([0, 1, 7, 1024, 1025, 2049]),
    layer_bytes=st.lists(
        st.one_of(st.integers(1, 20_000), st.sampled_from([PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1])),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_part_is_where_the_spec_says(tmp_path, num_experts, layer_bytes, resident_pages):
    spec = make_spec(
        num_layers=len(layer_bytes),
        num_experts=num_experts,
        slab_bytes=max(layer_bytes),
        slab_bytes_of_layers=tuple(layer_bytes) if len(set(layer_bytes)) > 1 else (),
        resident_bytes=resident_pages * PAGE_BYTES,
    )
    index = write_packed_weights_file(tmp_path / "model.slabs", spec)
    assert index.spec == spec
    content = index.path.read_bytes()
    assert len(content) == spec.file_bytes
    start = PAGE_BYTES + spec.table_bytes
    for layer, slab_bytes in enumerate(layer_bytes):
        assert start == spec.layer_starts[layer]
        for expert in range(num_experts):
            number = spec.number(layer, expert)
            assert start == spec.offset(number)
            assert content[start : start + slab_bytes] == slab(spec, layer, expert)
            assert not any(content[start + slab_bytes : spec.offset(number + 1)])
            start += -(-slab_bytes // PAGE_BYTES) * PAGE_BYTES
            assert index.checksums[number] == zlib.crc32(slab(spec, layer, expert))
    assert start == spec.resident_start
    assert content[start:] == resident(spec)
    for number in range(spec.num_slabs, spec.num_parts):
        start = spec.offset(number)
        assert index.checksums[number] == zlib.crc32(content[start : start + spec.part_bytes(number)])
    assert sum(map(spec.part_bytes, range(spec.num_parts))) == spec.content_bytes


def test_a_table_may_take_several_pages(tmp_path):
    spec = make_spec(num_layers=2, num_experts=512, slab_bytes=1)
    assert spec.table_bytes == 3 * PAGE_BYTES
    assert len(write_packed_weights_file(tmp_path / "many.slabs", spec).checksums) == 1024


@pytest.mark.parametrize("sizes", [(5000, 4096), (5000, 4096, 0), (4096, 4096, 4999), (5000, 5000, 5001)])
def test_sizes_of_layers_that_cannot_be_are_refused(tmp_path, sizes):
    index = write_packed_weights_file(tmp_path / "model.slabs", make_spec())
    header = encode_header(msgspec.structs.replace(index.spec, slab_bytes_of_layers=sizes))
    index.path.write_bytes(header + index.path.read_bytes()[PAGE_BYTES:])
    with pytest.raises(CheckpointError, match="describes weights that cannot be"):
        read_slab_index(index.path)


@pytest.mark.parametrize(("layer", "expert"), [(3, 0), (0, 4), (-1, 0), (0, -1)])
def test_slabs_that_do_not_exist_have_no_number(layer, expert):
    with pytest.raises(IndexError, match="3 layers of 4"):
        make_spec().number(layer, expert)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.slabs: cannot be read"):
        read_slab_index(tmp_path / "absent.slabs")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 9000])
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is no file of packed weights"):
        read_slab_index(file)


def test_another_version_says_so(tmp_path):
    file = tmp_path / "model.slabs"
    file.write_bytes(encode_header(make_spec(format_version=1)))
    with pytest.raises(CheckpointError, match=r"format version 1; this moeflow reads version 2.*Pack the model again"):
        read_slab_index(file)


DENSE = {"num_layers": 0, "num_experts": 0, "slab_bytes": 0}


def test_as_many_layers_as_no_file_has_take_no_memory(tmp_path):
    file = tmp_path / "model.slabs"
    file.write_bytes(encode_header(make_spec(num_layers=2**40, num_experts=1)) + bytes(PAGE_BYTES))
    with pytest.raises(CheckpointError, match="it was cut"):
        read_slab_index(file)


@pytest.mark.parametrize("change", [{"num_experts": 0}, {"slab_bytes": -1}, DENSE, {"resident_bytes": 4095}])
def test_impossible_sizes_are_refused(tmp_path, change):
    file = tmp_path / "model.slabs"
    file.write_bytes(encode_header(make_spec(**change)))
    with pytest.raises(CheckpointError, match="weights that cannot be"):
        read_slab_index(file)


def test_a_dense_model_has_no_slabs(tmp_path):
    spec = make_spec(**DENSE, resident_bytes=PIECE_BYTES + PAGE_BYTES)
    index = write_packed_weights_file(tmp_path / "model.slabs", spec)
    assert (spec.num_slabs, spec.num_parts, len(index.checksums)) == (0, 2, 2)
    assert spec.name(1) == "weights outside of experts, piece 1"


def test_our_files_are_told_from_others(tmp_path):
    index = write_packed_weights_file(tmp_path / "model.slabs", make_spec())
    (tmp_path / "other").write_bytes(b"GGUF")
    assert is_packed_weights_file(index.path)
    assert not is_packed_weights_file(tmp_path / "other")


def test_a_cut_file_says_how_long_it_should_be(tmp_path):
    index = write_packed_weights_file(tmp_path / "model.slabs", make_spec())
    with index.path.open("r+b") as stream:
        stream.truncate(index.spec.file_bytes - 1)
    with pytest.raises(CheckpointError, match=f"instead of {index.spec.file_bytes}"):
        read_slab_index(index.path)


@given(offset=st.integers(0, 2 * PAGE_BYTES - 1))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_before_the_slabs_is_found_or_harmless(tmp_path, offset):
    spec = make_spec()
    index = write_packed_weights_file(tmp_path / "model.slabs", spec)
    flip_bit(index.path, offset)
    if len(encode_header(spec).rstrip(b"\0")) <= offset < PAGE_BYTES:  # the rest of page 0 means nothing
        assert read_slab_index(index.path) == index
    else:
        with pytest.raises(CheckpointError, match=r"model\.slabs: .*(no file of packed|damaged|lacks)"):
            read_slab_index(index.path)
