import argparse
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.tensor_file import read_tensor_file
from moeflow.core.errors import CheckpointError
from moeflow.models.registry import read_model_config
from tests.models.parity import Pair, load
from tests.models.plain_gpt import EXPERTS, HEADS, HIDDEN, LAYERS, LENGTH, WIDTH, Choices, PlainGPT, PlainParity

FAIRSEQ = {"first_row": 2, "token_scale": math.sqrt(HIDDEN), "top_k": 2}
CASES = {  # and of how many ranks the experts are
    "as the 15B model": (Choices("gelu", is_sinusoidal=True, dense_width=40, **FAIRSEQ), EXPERTS),
    "one expert, learned positions": (Choices("relu", is_tied=False, **FAIRSEQ | {"top_k": 1, "token_scale": 1.0}), 2),
}
NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"}
NAMES |= {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm", "up": "fc1", "down": "fc2"}


def arguments(choices):
    return {
        "arch": "transformer_lm_gpt",
        "decoder_embed_dim": HIDDEN,
        "decoder_output_dim": HIDDEN,
        "decoder_input_dim": HIDDEN,
        "decoder_ffn_embed_dim": WIDTH,
        "alternate_decoder_ffn_embed_dim": choices.dense_width if choices.dense_width != WIDTH else 0,
        "decoder_layers": LAYERS,
        "decoder_attention_heads": HEADS,
        "decoder_normalize_before": True,
        "decoder_learned_pos": not choices.is_sinusoidal,
        "no_token_positional_embeddings": False,
        "no_scale_embedding": choices.token_scale == 1.0,
        "share_decoder_input_output_embed": choices.is_tied,
        "adaptive_softmax_cutoff": None,
        "activation_fn": choices.activation,
        "max_target_positions": LENGTH,
        "moe_freq": 2,
        "moe_expert_count": EXPERTS,
        "moe_top1_expert": choices.top_k == 1,
        "moe_second_expert_policy": "all",
        "moe_eval_capacity_token_fraction": -1.0,
    }


def write(model, num_ranks, folder, name="model", settings=None):
    """Save a model as fairseq does: `settings` under "cfg"; None: in a Namespace under "args", as old files have it."""
    shared, of_experts = {"decoder.version": torch.tensor([3.0])}, {}
    for key, weight in model.weights.items():
        parts = key.split(".")
        kind = "bias" if parts[-1] == "bias" else "weight"
        parts = parts[:-1] if kind == "bias" else parts
        layer = f"decoder.layers.{parts[0]}"
        if key.startswith("norm"):
            shared[f"decoder.layer_norm.{kind}"] = weight
        elif key in ("tokens", "positions", "head"):
            place = {"tokens": "embed_tokens", "positions": "embed_positions", "head": "output_projection"}[key]
            shared[f"decoder.{place}.weight"] = weight
        elif parts[1] == "gate":
            shared[f"{layer}.moe_layer.gate.wg.weight"] = weight
        elif len(parts) == 3:
            of_experts[layer, int(parts[1]), NAMES[parts[2]], kind] = weight
        else:
            shared[f"{layer}.{NAMES[parts[1]]}.{kind}"] = weight
    if model.choices.is_tied:
        shared["decoder.output_projection.weight"] = shared["decoder.embed_tokens.weight"]
    if model.choices.is_sinusoidal:
        shared["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    found = arguments(model.choices)
    said = {"args": argparse.Namespace(**found)} if settings is None else {"args": None, "cfg": {"model": settings}}
    torch.save({**said, "model": shared, "extra_state": {"epoch": 1}}, folder / f"{name}-shared.pt")
    count = EXPERTS // num_ranks
    for rank in range(num_ranks):
        own = {
            f"{layer}.moe_layer.experts.{expert % count}.{part}.{kind}": weight
            for (layer, expert, part, kind), weight in of_experts.items()
            if expert // count == rank
        }
        torch.save({"args": None, "model": own}, folder / f"{name}-rank-{rank}.pt")


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    choices, num_ranks = CASES[request.param]
    folder, theirs = tmp_path_factory.mktemp("fairseq"), PlainGPT(choices)
    write(theirs, num_ranks, folder, settings=None if choices.top_k == 1 else arguments(choices))
    return Pair(theirs, load(folder), str(folder))


class TestFairseq(PlainParity):
    pass


@pytest.fixture
def folder(tmp_path):
    choices, num_ranks = CASES["as the 15B model"]
    write(PlainGPT(choices), num_ranks, tmp_path)
    return tmp_path


def change(folder, do, file="model-shared.pt"):
    stored = torch.load(folder / file, weights_only=False)
    do(stored)
    torch.save(stored, folder / file)


def read_shape(folder):
    with closing(open_checkpoint(folder)) as checkpoint:
        return read_model_config(checkpoint)


def test_the_published_model_has_15_billion_parameters(folder):
    """As the paper counts them: 12 layers, 768 wide, 512 experts in every other one."""
    shape = read_shape(folder)
    assert shape.moe_layers == (1, 3)
    expert = 2 * 768 * 3072 + 768 + 3072
    assert 6 * 512 * expert == pytest.approx(14.5e9, rel=0.01)


@pytest.mark.parametrize("own", [[], [argparse.Namespace], [Path]], ids=["none", "the same", "another"])
def test_classes_that_pytorch_may_read_are_as_before(folder, own):
    of_torch = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(own):
        read_shape(folder)
        assert set(torch.serialization.get_safe_globals()) == of_torch | {*own}
    assert set(torch.serialization.get_safe_globals()) == of_torch


def test_threads_do_not_take_each_others_class_from_pytorchs_list(folder, monkeypatch):
    """The first thread would end while the second reads, if the second did not wait for it."""
    numbers, begun, is_second_in, is_first_done = count(), *(threading.Event() for _ in range(3))

    def load(*arguments, **options):
        if next(numbers) == 0:
            begun.set()
            is_second_in.wait(0.5)
        else:
            is_second_in.set()
            assert is_first_done.wait(60)
        return real(*arguments, **options)

    def read():
        return read_tensor_file(folder / "model-shared.pt")["args"].arch

    real = torch.load
    monkeypatch.setattr(torch, "load", load)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read)
        first.add_done_callback(lambda _: is_first_done.set())
        assert begun.wait(60)
        second = threads.submit(read)
        assert first.result() == second.result() == "transformer_lm_gpt"


class Hostile:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_file_with_anything_but_data_is_refused_and_runs_nothing(folder, capsys):
    change(folder, lambda stored: stored.update(extra_state=Hostile()))
    with pytest.raises(CheckpointError, match="cannot be read as tensors and settings"):
        open_checkpoint(folder)
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("layernorm_embedding", True, "'layernorm_embedding' is True"),
        ("decoder_normalize_before", False, "'decoder_normalize_before' is False"),
        ("scale_fc", torch.tensor([0, 0]), "'scale_fc' is <class 'torch.Tensor'>"),
        ("decoder_embed_dim", None, "has no 'decoder_embed_dim'"),
        ("decoder_output_dim", 16, "'decoder_output_dim' is 16"),
        ("activation_fn", "swish", "the activation is 'swish'"),
        ("decoder_attention_heads", 5, "no multiple of 'num_attention_heads'"),
    ],
)
def test_arguments_that_are_not_computed_are_refused(folder, name, value, problem):
    change(folder, lambda stored: setattr(stored["args"], name, value))
    with pytest.raises(CheckpointError, match=problem):
        read_shape(folder)


def test_files_that_do_not_belong_together_are_refused(folder):
    (folder / "model-rank-1.pt").rename(folder / "kept")
    with pytest.raises(CheckpointError, match=r"without model-rank-1\.pt"):
        open_checkpoint(folder)
    (folder / "kept").rename(folder / "model-rank-999999999999.pt")
    with pytest.raises(CheckpointError, match=r"without model-rank-1\.pt"):
        open_checkpoint(folder)
    (folder / "model-rank-999999999999.pt").rename(folder / "kept")
    (folder / "model-rank-1.pt").write_bytes((folder / "kept").read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(folder)
    (folder / "model-rank-1.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match=r"since PyTorch 1\.6"):
        open_checkpoint(folder)
    Path(folder / "kept").rename(folder / "model-rank-1.pt")
    (folder / "other-shared.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds 2 models"):
        open_checkpoint(folder)


def test_tensors_that_are_unknown_or_missing_are_refused(folder):
    change(folder, lambda stored: stored["model"].update({"decoder.layers.0.extra": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match="not part of the model"):
        load(folder)
    change(
        folder,
        lambda stored: (
            stored["model"].pop("decoder.layers.0.extra"),
            stored["model"].pop("decoder.layers.0.fc1.bias"),
        ),
    )
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.bias: is missing|is missing"):
        load(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {7: torch.zeros(3)},
        {"decoder.layers.0.fc1.bias": torch.zeros(3).to_sparse()},
        {"decoder.layers.0.fc1.bias": torch.zeros(3, device="meta")},
        {"decoder.layers.0.fc1.bias": 3.0},
    ],
)
def test_anything_but_plain_tensors_by_name_is_refused(folder, entry):
    change(folder, lambda stored: stored["model"].update(entry))
    with pytest.raises(CheckpointError, match=r"no dictionary of tensors by name|is no plain tensor"):
        open_checkpoint(folder)


def test_experts_of_endless_numbers_are_unknown(folder):
    name = f"decoder.layers.1.moe_layer.experts.{'9' * 5000}.fc1.bias"
    change(folder, lambda stored: stored["model"].update({name: torch.zeros(3)}), "model-rank-0.pt")
    with pytest.raises(CheckpointError, match="not part of the model"):
        load(folder)
