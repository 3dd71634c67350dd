from contextlib import closing

import numpy as np
import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.models.registry import read_model_config
from tests.models.parity import Pair, load
from tests.models.plain_gpt import EXPERTS, HEADS, HIDDEN, LAYERS, LENGTH, VOCAB, WIDTH, Choices, PlainGPT, PlainParity

CASES = {  # and among how many ranks the files are cut, and the type of numbers
    "as the published model": (Choices("tanh", 1), 4, "fp16"),
    "a head of its own, whole files": (Choices("tanh", 1, is_tied=False, moe_layers=(0, 1, 3)), 1, "fp32"),
}
INI = """[gpt]
model_name = gpt
head_num = {heads}
size_per_head = {head_dim}
inter_size = {width}
num_layer = {layers}
max_pos_seq_len = {length}
vocab_size = {vocab}
has_adapters = False
adapter_inter_size = 0
layernorm_eps = 1e-05
start_id = 5
end_id = 96
weight_data_type = {dtype}
tensor_para_size = {ranks}

[structure]
gpt_with_moe = 1
expert_num = {experts}
moe_layers = {moe_layers}
"""


def settings(choices, num_ranks, dtype):
    return INI.format(
        heads=HEADS,
        head_dim=HIDDEN // HEADS,
        width=WIDTH,
        layers=LAYERS,
        length=LENGTH,
        vocab=VOCAB,
        dtype=dtype,
        ranks=num_ranks,
        experts=EXPERTS,
        moe_layers=list(choices.moe_layers),
    )


def write(model, num_ranks, dtype, folder):
    """Save a model as NVIDIA's converter does: matrices turned, and cut among ranks by the axis named."""
    weights = {name: weight.numpy() for name, weight in model.weights.items()}

    def save(name, values, axis=None):
        pieces = [values] if axis is None else np.split(values, num_ranks, axis)
        for rank, piece in enumerate(pieces):
            file = f"model.{name}.bin" if axis is None else f"model.{name}.{rank}.bin"
            piece.astype({"fp16": np.float16, "fp32": np.float32}[dtype]).tofile(folder / file)

    def save_norm(name, to):
        save(f"{to}.weight", weights[name])
        save(f"{to}.bias", weights[f"{name}.bias"])

    save("wte", weights["tokens"])
    save("wpe", weights["positions"])
    save_norm("norm", "final_layernorm")
    if "head" in weights:
        save("lm_head.weight", weights["head"])
    for layer in range(LAYERS):
        to = f"layers.{layer}"
        save_norm(f"{layer}.norm1", f"{to}.input_layernorm")
        save_norm(f"{layer}.norm2", f"{to}.post_attention_layernorm")
        qkv = np.stack([weights[f"{layer}.{name}"].T for name in "qkv"], axis=1)  # [hidden, 3, hidden]
        save(f"{to}.attention.query_key_value.weight", qkv, -1)
        save(f"{to}.attention.query_key_value.bias", np.stack([weights[f"{layer}.{n}.bias"] for n in "qkv"]), -1)
        save(f"{to}.attention.dense.weight", weights[f"{layer}.o"].T, 0)
        save(f"{to}.attention.dense.bias", weights[f"{layer}.o.bias"])
        if layer in model.choices.moe_layers:
            save(f"{to}.mlp.moe.gate.wg.weight", weights[f"{layer}.gate"].T)
            up, down = (np.stack([weights[f"{layer}.{e}.{n}"].T for e in range(EXPERTS)]) for n in ("up", "down"))
            biases = [np.stack([weights[f"{layer}.{e}.{n}.bias"] for e in range(EXPERTS)]) for n in ("up", "down")]
            network, axes = f"{to}.mlp.moe.experts", (2, 1)
        else:
            up, down = weights[f"{layer}.up"].T, weights[f"{layer}.down"].T
            biases = [weights[f"{layer}.{n}.bias"] for n in ("up", "down")]
            network, axes = f"{to}.mlp", (1, 0)
        save(f"{network}.dense_h_to_4h.weight", up, axes[0])
        save(f"{network}.dense_h_to_4h.bias", biases[0], -1)
        save(f"{network}.dense_4h_to_h.weight", down, axes[1])
        save(f"{network}.dense_4h_to_h.bias", biases[1])
    (folder / "config.ini").write_text(settings(model.choices, num_ranks, dtype))


def rounded(model, dtype):
    """Return the model with its weights as files have them."""
    if dtype == "fp16":
        model.weights = {name: weight.half().float() for name, weight in model.weights.items()}
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    choices, num_ranks, dtype = CASES[request.param]
    folder, theirs = tmp_path_factory.mktemp("gpt_moe"), rounded(PlainGPT(choices), dtype)
    write(theirs, num_ranks, dtype, folder)
    return Pair(theirs, load(folder), str(folder))


class TestGPTMoE(PlainParity):
    pass


@pytest.fixture
def folder(tmp_path):
    choices, num_ranks, dtype = CASES["as the published model"]
    write(PlainGPT(choices), num_ranks, dtype, tmp_path)
    return tmp_path


def read_shape(folder):
    with closing(open_checkpoint(folder)) as checkpoint:
        return read_model_config(checkpoint), checkpoint.config


def test_the_settings_are_those_of_config_ini(folder):
    shape, config = read_shape(folder)
    assert (shape.moe_layers, shape.feed_forward.dense_layers, shape.routing.top_k, shape.routing.num_experts) == (
        (1, 3),
        (0, 2),
        1,
        EXPERTS,
    )
    assert (config["bos_token_id"], config["eos_token_id"], shape.max_position) == (5, 96, LENGTH)


@pytest.mark.parametrize(
    ("line", "to", "problem"),
    [
        ("has_adapters = False", "has_adapters = True", "'has_adapters' is 'True'"),
        ("inter_size = 48", "inter_size = 44", "bytes, where config.ini makes it"),
        ("num_layer = 4", "num_layer = 5", "is missing"),
        ("num_layer = 4", "", "has no 'num_layer'"),
        ("weight_data_type = fp16", "weight_data_type = int8", "'weight_data_type' is 'int8'"),
        ("tensor_para_size = 4", "tensor_para_size = 3", "does not divide"),
        ("moe_layers = [1, 3]", "moe_layers = 1, 3", "no list of numbers"),
        ("moe_layers = [1, 3]", 'moe_layers = {"1": 3}', "no list of numbers"),
        ("moe_layers = [1, 3]", "moe_layers = " + "[" * 100_000, "no list of numbers"),
        ("[gpt]", "[llama]", r"no section \[gpt\]"),
        ("expert_num = 4", "expert_num = 400000000", "at most"),
        ("[gpt]", "]", "is no configuration file"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, line, to, problem):
    file = folder / "config.ini"
    text = file.read_text()
    assert line in text
    file.write_text(text.replace(line, to))
    with pytest.raises(CheckpointError, match=problem):
        read_shape(folder)
