from contextlib import closing, nullcontext

import pytest
import torch
from gguf import GGMLQuantizationType

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, CheckpointError
from moeflow.kernels.cpu import extension
from moeflow.models import loading
from moeflow.models.layers.allocation.expert_homes import SlicedOnRanks
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from tests.checkpoint.tiny_models import random_weights, write_gguf
from tests.models.fake_checkpoint import FakeCheckpoint
from tests.models.parity import held_weights
from tests.models.tiny_config import CONFIG
from tests.parallel.thread_group import run_ranks

CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
LAYER_SHAPES = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
    "block_sparse_moe.gate": (3, 8),
    **{f"block_sparse_moe.experts.{e}.w1": (6, 8) for e in range(3)},
    **{f"block_sparse_moe.experts.{e}.w2": (8, 6) for e in range(3)},
    **{f"block_sparse_moe.experts.{e}.w3": (6, 8) for e in range(3)},
}
SHAPES = {
    "model.embed_tokens.weight": (20, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (20, 8),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER_SHAPES.items()},
}
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


@pytest.fixture
def checkpoint():
    torch.manual_seed(0)
    return FakeCheckpoint(dict(CONFIG), {name: torch.randn(shape) for name, shape in SHAPES.items()})


def load(checkpoint, dtype=torch.float32, packed=None, **options):
    allocator = TensorAllocator(dtype, CPU) if packed is None else PackedAllocator(dtype, CPU, packed)
    return load_model(checkpoint, allocator, **options)


def test_every_tensor_lands_in_its_place(checkpoint):
    model = load(checkpoint)
    destinations = dict(model.named_weights())
    assert destinations.keys() == SHAPES.keys()
    for name, view in destinations.items():
        assert torch.equal(view, checkpoint.weights[name])
    moe = model.layers[1].mlp
    assert torch.equal(moe.weights.down[2], checkpoint.weights[EXPERT])
    assert torch.equal(moe.weights.gate_up[2, :6], checkpoint.weights[EXPERT.replace("w2", "w1")])
    assert torch.equal(moe.weights.gate_up[2, 6:], checkpoint.weights[EXPERT.replace("w2", "w3")])


def test_no_weight_is_left_uninitialised(checkpoint):
    model = load(checkpoint)
    loaded = sum(weight.numel() for weight in checkpoint.weights.values())
    assert sum(weight.numel() for weight in held_weights(model)) == loaded


def test_weights_are_converted(checkpoint):
    model = load(checkpoint, torch.bfloat16)
    assert {weight.dtype for weight in held_weights(model)} == {torch.bfloat16}
    assert torch.equal(model.layers[1].mlp.weights.down[2], checkpoint.weights[EXPERT].to(torch.bfloat16))


def test_progress_ends_at_the_bytes_of_the_file(checkpoint):
    reports = []
    load(checkpoint, torch.bfloat16, progress=lambda done, total: reports.append((done, total)))
    total = sum(weight.nbytes for weight in checkpoint.weights.values())
    assert len(reports) == len(SHAPES)
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


@needs_extension
@pytest.mark.parametrize("num_threads", [1, 3])
def test_packed_weights_are_the_same_values(checkpoint, num_threads, monkeypatch):
    monkeypatch.setattr(loading, "_PIECE_BYTES", 16 * 8 * 4)  # so that the embeddings are two pieces
    reports = []
    formats = WeightFormats("float32", "float32")
    model = load(checkpoint, packed=formats, num_threads=num_threads, progress=lambda *done: reports.append(done))
    for name, destination in model.named_weights():
        values = destination if isinstance(destination, torch.Tensor) else destination.unpack()
        assert torch.equal(values, checkpoint.weights[name]), name
    total = sum(weight.nbytes for weight in checkpoint.weights.values())
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)
    assert len(reports) > len(SHAPES)


@needs_extension
@pytest.mark.parametrize(("formats", "router"), [(("int4", "int8"), "float32"), (("bfloat16",) * 3, "bfloat16")])
def test_each_kind_of_matrix_has_its_format(checkpoint, formats, router):
    model = load(checkpoint, packed=WeightFormats(*formats))
    moe = model.layers[0].mlp
    assert (moe.weights.format, moe.router.format) == (formats[0], router)
    assert (model.embed_tokens.format, model.lm_head.format) == (formats[1], formats[1])
    assert model.layers[0].self_attn.qkv_proj.weight.format == formats[0]


@needs_extension
def test_an_error_while_reading_stops_the_other_threads(checkpoint):
    begun = []

    def read_rows(name, start, stop):
        begun.append(name)
        raise CheckpointError("broke", file="model.safetensors", tensor=name, remedy="none")

    checkpoint.read_rows = read_rows
    with pytest.raises(CheckpointError, match="broke"):
        load(checkpoint, packed=WeightFormats("float32", "float32"), num_threads=2)
    assert 1 <= len(begun) <= 2  # each thread has begun one at most when it sees the other's error


def test_a_missing_tensor_is_named(checkpoint):
    del checkpoint.weights[EXPERT]
    with pytest.raises(CheckpointError, match="is missing") as error:
        load(checkpoint)
    assert error.value.tensor == EXPERT
    assert error.value.file == "/models/fake"
    assert "config.json" in error.value.remedy


def test_many_missing_tensors_are_listed_in_short(checkpoint):
    checkpoint.config["num_hidden_layers"] = 3
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight.* and 13 more"):
        load(checkpoint)


def test_a_surplus_tensor_is_named(checkpoint):
    checkpoint.weights["model.layers.0.self_attn.q_proj.bias"] = torch.randn(8)
    with pytest.raises(CheckpointError, match="not part of the model") as error:
        load(checkpoint)
    assert error.value.tensor == "model.layers.0.self_attn.q_proj.bias"
    assert error.value.file == "/models/fake/model.safetensors"


def test_surplus_layers_are_listed(checkpoint):
    checkpoint.config["num_hidden_layers"] = 1
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..* and 13 more"):
        load(checkpoint)


@pytest.mark.parametrize("shape", [(6, 8), (8, 7), (8,), (48,), (1, 8, 6)])
def test_a_tensor_of_another_shape_is_named(checkpoint, shape):
    checkpoint.weights[EXPERT] = torch.randn(shape)
    with pytest.raises(CheckpointError, match=r"where config\.json makes it \[8, 6\]") as error:
        load(checkpoint)
    assert error.value.tensor == EXPERT
    assert str(list(shape)) in str(error.value)


def test_errors_come_before_any_weight_is_read(checkpoint):
    checkpoint.weights.pop("model.norm.weight")
    checkpoint.read = lambda name: pytest.fail(f"{name} was read")
    with pytest.raises(CheckpointError):
        load(checkpoint)


def test_tied_embeddings_need_no_output_matrix(checkpoint):
    checkpoint.config["tie_word_embeddings"] = True
    del checkpoint.weights["lm_head.weight"]
    model = load(checkpoint)
    assert model.lm_head is model.embed_tokens
    assert torch.equal(model.lm_head, checkpoint.weights["model.embed_tokens.weight"])


def test_a_model_larger_than_memory_says_what_it_needs(checkpoint):
    huge = 2**44
    checkpoint.config["vocab_size"] = huge
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        checkpoint.weights[name] = torch.empty(huge, 8, device="meta")
    with pytest.raises(CapacityError, match=r"need 1048576\.0 GiB on cpu"):
        load(checkpoint)


@needs_extension
@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        (GGMLQuantizationType.F32, WeightFormats("float32", "float32")),
        (GGMLQuantizationType.Q8_0, WeightFormats("int8", "int8", is_wide=True)),
        (GGMLQuantizationType.Q4_0, WeightFormats("int4", "int4", is_wide=True)),
        (GGMLQuantizationType.Q4_1, WeightFormats("int4-min", "int4-min", is_wide=True)),
    ],
)
def test_ranks_take_over_their_rows_of_a_file_as_they_lie_there(tmp_path, kind, formats):
    """Also of queries and keys, whose rows GGUF has in another order within each head."""
    file = write_gguf(tmp_path / "model.gguf", "mixtral", random_weights("mixtral"), kind)

    def taken_over(**more):
        with closing(open_checkpoint(file)) as checkpoint:
            model = load_model(checkpoint, PackedAllocator(torch.float32, CPU, formats, **more))
        return {name: place for name, place in model.named_weights() if not isinstance(place, torch.Tensor)}

    whole = taken_over()
    ranks = run_ranks(3, lambda group: taken_over(home=SlicedOnRanks(group), tensor_group=group))
    for name, place in whole.items():
        wanted = place.unpack()
        seen = torch.zeros(len(wanted), dtype=torch.bool)
        for held in ranks:
            rows = slice(held[name].first, held[name].first + held[name].shape[0])
            assert torch.equal(held[name].unpack(), wanted[rows])
            seen[rows] = True
        assert seen.all()


def test_an_error_of_the_device_is_not_called_a_lack_of_memory(checkpoint, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(TensorAllocator, "empty", refuse)
    with pytest.raises(RuntimeError, match="no kernel image"):
        load(checkpoint)


def test_a_lack_of_memory_while_weights_arrive_is_named(checkpoint, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "copy_into", refuse)
    with pytest.raises(CapacityError, match=r"The weights need .* cannot be allocated; take a smaller"):
        load(checkpoint)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
def test_matrices_for_a_gpu_come_in_pieces(tmp_path, monkeypatch, kind, num_threads):
    """Also queries and keys, whose rows GGUF has in another order within each head."""
    file = write_gguf(tmp_path / "model.gguf", "mixtral", random_weights("mixtral"), kind)
    read = []

    def taken_over():
        with closing(open_checkpoint(file)) as checkpoint:
            rows = checkpoint.read_rows
            checkpoint.read_rows = lambda name, start, stop: read.append((start, stop)) or rows(name, start, stop)
            model = load_model(checkpoint, TensorAllocator(torch.float32, CPU), num_threads=num_threads)
        return dict(model.named_weights())

    wanted = taken_over()
    assert not read
    monkeypatch.setattr(loading, "is_in_main_memory", lambda _: False)
    monkeypatch.setattr(loading, "_COPIED_BYTES", 1)
    found = taken_over()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    matrices = [weight for weight in wanted.values() if weight.dim() == 2]
    pieces = sum(-(-len(weight) // 16) for weight in matrices)
    assert (len(read) == pieces) == (kind != GGMLQuantizationType.Q8_0)
    assert all(stop - start <= 16 for start, stop in read)


def test_threads_that_load_for_a_gpu_do_not_start_teams(checkpoint, monkeypatch):
    """The stand-in of a GPU has shapes alone."""
    before, seen = torch.get_num_threads(), []

    class Staging:
        def __init__(self, device):
            assert device.type == "meta"

        def copying(self):
            return nullcontext()

        on_stream = copying

        def copy(self, target, source):
            seen.append((torch.get_num_threads(), target.shape == source.shape))

    torch.set_num_threads(2)
    try:
        monkeypatch.setattr("moeflow.pipeline.devices.staging.Staging", Staging)
        load_model(checkpoint, TensorAllocator(torch.float32, torch.device("meta")), num_threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [(1, True)] * len(SHAPES)
