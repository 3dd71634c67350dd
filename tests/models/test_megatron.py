"""Megatron's and DeepSpeed's files against Megatron's published forward, written out in plain torch."""

import shutil
import sys
from contextlib import closing
from enum import Enum
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.tensor_file import read_tensor_file
from moeflow.core.errors import CheckpointError
from moeflow.engine.engine import Engine
from moeflow.models.plausibility import read_eos_token_ids
from moeflow.models.registry import read_model_config
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers
from tests.models.megatron_gpt import EXPERTS, LENGTH, MOE_LAYERS, VOCAB, Choices, MegatronGPT, write
from tests.models.parity import SEQUENCES, SHAPE, Cache, load, random_model

CASES = {
    "modelscope": Choices(),
    "deepspeed": Choices(2, is_fused=False, has_head=True, version=3.0, num_ranks=2, form="deepspeed"),
    "deepspeed-whole-experts": Choices(version=2.0, num_ranks=2, form="deepspeed", expert_ranks="whole"),
    "deepspeed-experts-once": Choices(2, version=1.0, num_ranks=4, form="deepspeed", expert_ranks="first"),
    "megatron-0": Choices(num_ranks=2, form="megatron"),
    "megatron-1": Choices(version=1.0, num_ranks=2, form="megatron"),
    "megatron-3": Choices(2, version=3.0, form="megatron"),
}


@pytest.fixture(params=CASES)
def made(request, tmp_path):
    theirs = MegatronGPT(CASES[request.param])
    write(theirs, tmp_path)
    return theirs, tmp_path


def test_logits_are_those_of_megatrons_forward(made):
    theirs, folder = made
    sequences = {name: [token_id % VOCAB for token_id in ids] for name, ids in SEQUENCES.items()}
    for name, logits in Cache(load(folder)).run(sequences).items():
        expected = theirs(torch.tensor([sequences[name]])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_rows_are_those_of_whole_tensors(made):
    with closing(open_checkpoint(made[1])) as checkpoint:
        for name, info in checkpoint.tensors.items():
            whole = checkpoint.read(name)
            assert (tuple(whole.shape), whole.nbytes, str(whole.dtype)) == (info.shape, info.num_bytes, "torch.float32")
            assert torch.equal(checkpoint.read_rows(name, 1, 3).values, whole[1:3])


@pytest.mark.parametrize("name", ["modelscope", "deepspeed"])
def test_greedy_tokens_through_the_engine(tmp_path, name):
    theirs, prompt = MegatronGPT(CASES[name]), [5, 9, 20, 31, 7]
    write(theirs, tmp_path)
    expected = list(prompt)
    for _ in range(12):
        expected.append(int(theirs(torch.tensor([expected])).logits[0, -1].argmax()))
    engine = Engine.load(resolve(Settings(model=str(tmp_path), num_threads=1, kv_cache_bytes=2**20)).config)
    try:
        assert answers(engine, [prompt]) == ([expected[len(prompt) :]], {})
    finally:
        engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of two ranks, as DeepSpeed saves them."""
    place = tmp_path_factory.mktemp("deepspeed")
    write(MegatronGPT(CASES["deepspeed"]), place)
    return place


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of these files."""
    return shutil.copytree(saved, tmp_path / "model")


RANK = "mp_rank_{:02}_model_states.pt"
EXPERT = "layer_{}_expert_{}_mp_rank_{:02}_model_states.pt"
PLACE = "language_model.encoder.layers."


def change(folder, do, file="mp_rank_00_model_states.pt"):
    stored = torch.load(folder / file, weights_only=False)
    do(stored)
    torch.save(stored, folder / file)


def check_refused(folder, problem):
    with pytest.raises(CheckpointError, match=problem) as refused:
        load(folder)
    assert refused.value.remedy


def test_settings_are_those_of_the_arguments_and_tensors(folder, tmp_path_factory):
    with closing(open_checkpoint(folder)) as checkpoint:
        shape = read_model_config(checkpoint)
    assert (shape.moe_layers, shape.routing.num_experts, shape.routing.top_k) == (MOE_LAYERS, EXPERTS, 2)
    assert (shape.max_position, shape.vocab_size, shape.feed_forward.hidden_act) == (LENGTH, VOCAB, "gelu")
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    with closing(open_checkpoint(folder)) as checkpoint:
        assert read_eos_token_ids(checkpoint) == (5,)
    of_modelscope = tmp_path_factory.mktemp("modelscope")
    write(MegatronGPT(CASES["modelscope"]), of_modelscope)
    with closing(open_checkpoint(of_modelscope)) as checkpoint:
        assert (checkpoint.config["eos_token_id"], checkpoint.config["num_experts_per_tok"]) == (7, 1)


def by_value(member, protocol):
    """Pickle a member of an enumeration as most versions of Python do."""
    return type(member), (member.value,)


def by_name(member, protocol):
    """Pickle it as Python 3.11.0 to 3.11.3 do."""
    return getattr, (type(member), member.name)


@pytest.mark.parametrize(("pickled", "is_number"), [(by_value, True), (by_name, False)])
def test_the_states_of_a_training_are_read_as_data(folder, monkeypatch, pickled, is_number):
    """Megatron's enumerations, whose module is not there when reading, and skipped random numbers' states."""
    module = ModuleType("megatron.core.enums")
    module.ModelType = Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)
    module.ModelType.__reduce_ex__ = pickled
    for name in ("megatron", "megatron.core", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    change(folder, lambda stored: setattr(stored["args"], "model_type", module.ModelType.encoder_or_decoder))
    for name in ("megatron", "megatron.core", module.__name__):
        monkeypatch.delitem(sys.modules, name)
    stored = read_tensor_file(folder / RANK.format(0))
    assert (stored["args"].model_type == 1) == is_number
    assert stored["rng_state"][0]["np_rng_state"][2] == 624
    assert not isinstance(stored["rng_state"][0]["np_rng_state"][1], np.ndarray)


class Reduced:
    """Pickled as any call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_forged_addresses_in_arrays_of_objects_are_not_followed(folder):
    """Such an array has a Python object at an address of the file's choice."""
    forged = Reduced(np.ndarray, ((1,), Reduced(np.dtype, ("O",)), b"A" * 8))
    change(folder, lambda stored: setattr(stored["args"], "topk", forged))
    stored = read_tensor_file(folder / RANK.format(0))
    assert not isinstance(stored["args"].topk, np.ndarray)
    check_refused(folder, "'topk' is")


HOSTILE = Reduced(print, ("this must not run",))


@pytest.mark.parametrize("file", [RANK.format(1), EXPERT.format(0, 2, 0)])
def test_a_file_with_code_is_refused_and_runs_nothing(folder, capsys, file):
    change(folder, lambda stored: stored.update(more=HOSTILE), file)
    check_refused(folder, "cannot be read as tensors and settings")
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (RANK.format(0), "without the part of tensor-parallel rank 0"),
        (RANK.format(1), "without the part of tensor-parallel rank 1"),
        (EXPERT.format(1, 2, 0), "parts of 1 of 2 tensor-parallel ranks"),
        (EXPERT.format(1, 2, 1), "parts of 1 of 2 tensor-parallel ranks"),
    ],
)
def test_files_that_are_missing_are_named(folder, file, problem):
    (folder / file).unlink()
    check_refused(folder, problem)


def test_an_expert_without_any_file_is_named(folder):
    for rank in range(2):
        (folder / EXPERT.format(1, 2, rank)).unlink()
    check_refused(folder, "no weights of expert 2 of layer 3")


def test_ranks_that_the_arguments_count_are_all_needed(folder):
    for file in [RANK.format(1), *(EXPERT.format(*it, 1) for it in product(range(2), range(EXPERTS)))]:
        (folder / file).unlink()
    check_refused(folder, "without the part of tensor-parallel rank 1")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("apply_residual_connection_post_layernorm", True, "'apply_residual_connection_post_layernorm' is True"),
        ("swiglu", True, "'swiglu' is True"),
        ("normalization", "RMSNorm", "'normalization' is 'RMSNorm'"),
        ("mlp_type", "residual", "'mlp_type' is 'residual'"),
        ("pipeline_model_parallel_size", 2, "'pipeline_model_parallel_size' is 2"),
        ("topk", 3, "'topk' is 3"),
        ("hidden_size", None, "has no 'hidden_size'"),
        ("num_attention_heads", 3, "no queries, keys and values of 1 heads|no queries, keys and values of 3 heads"),
        ("num_layers", 3, r"'moe_layers' is \[1, 3\]"),
        ("num_layers", 5, "is missing"),
        ("ffn_hidden_size", 64, "shape"),
        ("topk", torch.tensor([1, 2]), "'topk' is <class 'torch.Tensor'>"),
        ("hidden_size", torch.tensor([1, 2]), "'hidden_size' is <class 'torch.Tensor'>"),
        ("tensor_model_parallel_size", 1, "parts of 2 tensor-parallel ranks, where its arguments name 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(folder, name, value, problem):
    change(folder, lambda stored: setattr(stored["args"], name, value))
    check_refused(folder, problem)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("0.self_attention.dense.weight", torch.zeros(32, 15), "parts of unlike shapes"),
        ("0.self_attention.query_key_value.weight", torch.zeros(()), "parts of unlike shapes"),
        ("1.mlp.deepspeed_moe.gate.wg.weight", torch.zeros(4, 32, dtype=torch.int32), "stored in int32"),
        ("1.mlp.deepspeed_moe.gate.wg.weight", torch.zeros(4, 32).to_sparse(), "no plain tensor"),
        ("1.mlp.deepspeed_moe.gate.wg.weight", 3.0, "no plain tensor"),
        ("0.extra.weight", torch.zeros(3), "parts of 1 of 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, name, value, problem):
    change(folder, lambda stored: stored["module"].update({PLACE + name: value}))
    check_refused(folder, problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({PLACE + "0.extra.weight": torch.zeros(3)}, "not part of the model"),
        ({PLACE + "3.mlp.deepspeed_moe.gate.wg.weight": torch.zeros(5, 32)}, "unlike numbers of experts"),
        ({PLACE + "3.mlp.deepspeed_moe.gate.wg.weight": torch.zeros(())}, "is no matrix"),
        ({PLACE + "0.mlp.gate.weight": torch.zeros(4, 32)}, "not part of the model"),
        ({"language_model.embedding.word_embeddings.weight": torch.zeros(())}, "is no matrix"),
        ({PLACE + "0.mlp.dense_4h_to_h.weight": torch.zeros(3)}, "is no matrix"),
        ({PLACE + "0.self_attention.query_key_value.weight": torch.zeros(())}, "no queries, keys and values"),
    ],
    ids=str,
)
def test_tensors_that_no_rank_has_right_are_refused(folder, changes, problem):
    for rank in range(2):
        change(folder, lambda stored: stored["module"].update(changes), RANK.format(rank))
    check_refused(folder, problem)


CYCLE = {}
CYCLE["a"] = CYCLE


def shared_dictionaries(depth):
    """Return dictionaries with 2 ** depth paths."""
    found = {}
    for _ in range(depth):
        found = {"a": found, "b": found}
    return found


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"module": None}, "no dictionary of weights"),
        ({"module": {7: torch.zeros(3)}}, "weights without names"),
        ({"args": None}, "no arguments of a training"),
        ({"args": [1]}, "no arguments of a training"),
        ({"checkpoint_version": 4.0}, "'checkpoint_version' 4.0"),
        ({"checkpoint_version": "new"}, "'checkpoint_version' 'new'"),
        ({"checkpoint_version": [3]}, "'checkpoint_version'"),
        ({"checkpoint_version": torch.tensor([3, 3])}, "'checkpoint_version' <class 'torch.Tensor'>"),
        ({"module": CYCLE}, "names of over 512 characters"),
        ({"module": shared_dictionaries(30)}, "tensors, where at most"),
    ],
    ids=[f"contents-{number}" for number in range(10)],
)
def test_other_contents_are_refused(folder, entries, problem):
    for rank in range(2):
        change(folder, lambda stored: stored.update(entries), RANK.format(rank))
    check_refused(folder, problem)


def test_folders_that_hold_no_such_model_are_refused(folder):
    for name in ("mp_rank_00_001", "mp_rank_00_001_000"):
        (folder / name).mkdir()
        check_refused(folder, "pipeline stages, or the experts of expert-parallel ranks")
        (folder / name).rmdir()
    (folder / "mp_rank_02").mkdir()
    check_refused(folder, r"holds 0 of model_rng\.pt")


def test_the_last_save_is_taken_where_a_file_names_it(folder):
    save = folder / "global_step9"
    save.mkdir()
    for file in folder.glob("*.pt"):
        shutil.move(file, save)
    (folder / "latest").write_text("global_step9")
    assert load(folder).config.num_layers == 4
    for name in ("../elsewhere", ".."):
        (folder / "latest").write_text(name)
        check_refused(folder, f"names '{name}', no folder")


def test_a_training_with_a_model_in_hugging_face_form_is_that_model(folder):
    random_model(AutoConfig.for_model("mixtral", **SHAPE, num_local_experts=2)).save_pretrained(folder)
    with closing(open_checkpoint(folder)) as checkpoint:
        assert checkpoint.config["model_type"] == "mixtral"
