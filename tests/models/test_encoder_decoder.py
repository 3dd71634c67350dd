"""Switch Transformers and T5 against transformers' own: whole texts, and decoded bit by bit in a batch with others."""

from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.kernels.capacity import ExpertCapacity
from moeflow.kernels.cpu import extension
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.loading import load_model
from moeflow.models.pass_input import PassInput
from moeflow.models.registry import read_model_config
from tests.tiny_switch import write_tiny_switch, write_tiny_t5

CPU = torch.device("cpu")
BLOCK_SIZE = 16
KINDS = {
    "switch": lambda folder: write_tiny_switch(folder),
    "switch-64": lambda folder: write_tiny_switch(folder, num_experts=64),
    "switch-every-layer": lambda folder: write_tiny_switch(
        folder, num_sparse_encoder_layers=4, num_sparse_decoder_layers=2
    ),
    "switch-none-asked": lambda folder: write_tiny_switch(
        folder, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0
    ),
    "t5": lambda folder: write_tiny_t5(folder),
    "t5-gated": lambda folder: write_tiny_t5(folder, feed_forward_proj="gated-gelu"),
}
FORMATS = [
    None,
    pytest.param("float32", marks=pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())),
]
INPUTS = [[5, 9, 200, 31], list(range(2, 75)), [7], list(range(100, 140))]
OUTPUTS = [[0, 8, 9, 10, 11, 12], [0, 3], [0, *range(50, 95)], [0]]


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return KINDS[request.param](folder), folder


def load(folder, packed, **options):
    with closing(open_checkpoint(folder)) as checkpoint:
        if packed is None:
            return load_model(checkpoint, TensorAllocator(torch.float32, CPU, **options))
        return load_model(checkpoint, PackedAllocator(torch.float32, CPU, WeightFormats(packed, packed), **options))


class Sequences:
    """Some sequences of a model, each in blocks of its own, which are scattered."""

    def __init__(self, model, inputs):
        self.model = model
        self.inputs = inputs
        self.starts = [-(-len(one) // BLOCK_SIZE) * BLOCK_SIZE for one in inputs]
        config = model.config
        order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
        self.blocks = [tuple(order[8 * i : 8 * i + 8]) for i in range(len(inputs))]
        self.kv = KVStorage(
            layers=range(config.num_layers),
            num_blocks=64,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.attention.num_kv_heads,
            head_dim=config.attention.head_dim,
            dtype=torch.float32,
            device=CPU,
        )

    def run(self, pieces):
        """Compute tokens [start, stop) of the decoder of some sequences, with the input if they begin there."""
        given = PassInput([], [], [], [], [], num_encoder_tokens=[len(self.inputs[i]) for i, *_ in pieces])
        for i, start, token_ids in pieces:
            filling = [0] * (self.starts[i] - len(self.inputs[i]))
            new = [*self.inputs[i], *filling, *token_ids] if start == 0 else list(token_ids)
            given.token_ids.extend(new)
            given.starts.append(0 if start == 0 else self.starts[i] + start)
            given.num_tokens.append(len(new))
            given.block_ids.append(self.blocks[i])
        hidden = self.model(*given.tensors(self.kv, CPU))
        ends, found = 0, []
        for count, (_, _, token_ids) in zip(given.num_tokens, pieces, strict=True):
            ends += count
            found.append(self.model.logits(hidden[ends - len(token_ids) : ends]))
        return found


def expected(theirs, input_ids, output_ids):
    with torch.no_grad():
        return theirs(input_ids=torch.tensor([input_ids]), decoder_input_ids=torch.tensor([output_ids])).logits[0]


@pytest.mark.parametrize("packed", FORMATS)
def test_whole_texts_beside_each_other(made, packed):
    theirs, folder = made
    found = Sequences(load(folder, packed), INPUTS).run([(i, 0, ids) for i, ids in enumerate(OUTPUTS)])
    for logits, input_ids, output_ids in zip(found, INPUTS, OUTPUTS, strict=True):
        torch.testing.assert_close(logits, expected(theirs, input_ids, output_ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", FORMATS)
def test_token_by_token_while_others_come_and_go(made, packed):
    theirs, folder = made
    sequences = Sequences(load(folder, packed), INPUTS)
    found = {0: [], 1: [], 2: [], 3: []}

    def run(*pieces):
        for (i, *_), logits in zip(pieces, sequences.run(pieces), strict=True):
            found[i].append(logits)

    run((2, 0, OUTPUTS[2][:1]))
    run((2, 1, OUTPUTS[2][1:2]), (0, 0, OUTPUTS[0][:1]))
    run((0, 1, OUTPUTS[0][1:4]), (2, 2, OUTPUTS[2][2:30]), (1, 0, OUTPUTS[1]))
    run((3, 0, OUTPUTS[3]), (2, 30, OUTPUTS[2][30:]), (0, 4, OUTPUTS[0][4:]))
    for i, pieces in found.items():
        torch.testing.assert_close(torch.cat(pieces), expected(theirs, INPUTS[i], OUTPUTS[i]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", FORMATS)
@pytest.mark.parametrize("capacity", [1, 5])
def test_experts_take_no_more_of_an_input_than_their_capacity(tmp_path, packed, capacity):
    theirs = write_tiny_switch(tmp_path, expert_capacity=capacity)
    first_token = [(0, 0, [0])]  # where transformers' decoder drops nothing
    unlimited = load(tmp_path, packed)
    for input_ids in INPUTS:
        limit = ExpertCapacity(4 * capacity / len(input_ids))  # of four experts, and a pass of this input alone
        (found,) = Sequences(load(tmp_path, packed, capacity=limit), [input_ids]).run(first_token)
        (more,) = Sequences(unlimited, [input_ids]).run(first_token)
        torch.testing.assert_close(found, expected(theirs, input_ids, [0]), rtol=1e-4, atol=1e-4)
        assert torch.equal(found, more) == (len(input_ids) <= capacity) == (limit.num_dropped == 0)


def test_parameters_are_counted(made):
    theirs, folder = made
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_model_config(checkpoint)
    counted = sum(
        weight.numel()
        for name, weight in theirs.named_parameters()
        if "norm" not in name and "relative_attention_bias" not in name
    )
    assert config.num_parameters == counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_act_fn": "tanh"}, "dense_act_fn"),
        ({"router_bias": True}, "router_bias"),
        ({"d_kv": 7}, "d_kv"),
        ({"relative_attention_num_buckets": 6}, "buckets"),
        ({"relative_attention_max_distance": 4}, "buckets"),
        ({"decoder_start_token_id": 999}, "decoder_start_token_id"),
    ],
)
def test_configs_that_are_computed_otherwise_are_refused(tmp_path, changes, message):
    write_tiny_switch(tmp_path)
    import json

    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with closing(open_checkpoint(tmp_path)) as checkpoint, pytest.raises(CheckpointError, match=message):
        read_model_config(checkpoint)
