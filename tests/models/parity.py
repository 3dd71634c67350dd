"""What every family must show: the same as transformers' own model, in every way that a pass can be cut.

A test file of a family gives a fixture `pair` (through `make_pair`) and inherits `Parity`.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.mapped import map_weights
from moeflow.checkpoint.packed.weight_memory import FreshMemory
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ParallelConfig
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.cpu import extension
from moeflow.kernels.recurrent.state_sequences import NO_STATE, StateSequence, StateSequences
from moeflow.kv.state_storage import StateStorage
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.allocation.expert_homes import home_on_ranks
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
from moeflow.models.layers.ranks.summed_experts import ExpertDevices
from moeflow.models.loading import load_model
from moeflow.models.packing import pack_model
from moeflow.parallel.blocks import with_kv_heads_of
from moeflow.parallel.device_group import DeviceGroup
from tests.parallel.thread_group import run_ranks

CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "int8")]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def layouts_of(config: ModelConfig, num_ranks: int) -> list[dict[str, str]]:
    """Return the ways to share a model among so many ranks."""
    of_heads = ["replicated", "tensor"] if config.attention.latent is None else ["replicated"]
    found = product(["expert", "sliced"] if num_ranks <= config.routing.num_experts else ["sliced"], of_heads)
    return [{"expert_layout": experts, "attention_layout": attention} for experts, attention in found]


@dataclass(frozen=True)
class Pair:
    """transformers' model and ours, of the same checkpoint."""

    theirs: PreTrainedModel
    ours: CausalLM
    folder: str


def make_pair(config: PretrainedConfig, folder) -> Pair:
    """Write a random checkpoint with transformers and load it with both."""
    theirs = random_model(config)
    theirs.save_pretrained(folder)
    return Pair(theirs, load(folder), str(folder))


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model without any weight of zero or one, so that an omitted weight shows."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name and weight.dim() == 1
            weight.copy_(torch.randn(weight.shape) * (0.3 if is_norm else 0.15) + (1.0 if is_norm else 0.0))
        for name, buffer in model.named_buffers():
            if name in model.state_dict():  # biases of routers' choices, and what layers are multiplied by
                buffer.copy_(torch.randn(buffer.shape) * 0.15 + ("layer_scalar" in name))
    return model


def load(folder, dtype=torch.float32, packed: WeightFormats | None = None, **more) -> CausalLM:
    with closing(open_checkpoint(folder)) as checkpoint:
        if packed is None:
            return load_model(checkpoint, TensorAllocator(dtype, CPU, **more))
        return load_model(checkpoint, PackedAllocator(dtype, CPU, packed, **more))


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(SHAPE["vocab_size"]), k=count)


SEQUENCES = {"a": tokens(30, 1), "b": tokens(7, 2), "c": tokens(18, 3), "d": tokens(1, 4), "e": tokens(33, 5)}


def their_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return their_logits_of_all(model, [token_ids])[0]


@torch.inference_mode()
def their_logits_of_all(model: PreTrainedModel, prompts: Iterable[list[int]]) -> torch.Tensor:
    """Return the logits [N, n, V] of N prompts of the same length."""
    logits: torch.Tensor = model(torch.tensor([*prompts])).logits
    return logits


class Cache:
    """Sequences over one paged cache, with shuffled blocks; remembers how far each has come.

    `kept` has the KV heads that a rank has; None: all.
    """

    def __init__(
        self, model: CausalLM, *, block_size: int = 4, num_blocks: int = 64, kept: ModelConfig | None = None
    ) -> None:
        config: ModelConfig = kept or model.config
        self.model = model
        self.block_size = block_size
        self.free = list(range(num_blocks))
        random.Random(3).shuffle(self.free)
        self.lengths: dict[str, int] = defaultdict(int)
        self.block_ids: dict[str, list[int]] = defaultdict(list)
        self.slots: dict[str, int] = {}  # of states, in recurrent layers
        self.kv = KVStorage(
            layers=config.kv_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.attention.num_kv_heads,
            head_dim=config.attention.head_dim,
            latent_dim=config.attention.latent_dim,
            other_heads=config.attention.other_heads,
            dtype=model.dtype,
            device=CPU,
        )
        if config.recurrent is not None:
            self.kv.states = StateStorage(config.recurrent, num_slots=16, device=torch.device("cpu"))

    def run(self, new: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Compute some tokens of some sequences in one pass; return each one's logits [n, V]."""
        starts = [self.lengths[name] for name in new]
        for name, ids in new.items():
            self.lengths[name] += len(ids)
            while len(self.block_ids[name]) * self.block_size < self.lengths[name]:
                self.block_ids[name].append(self.free.pop())
        attention = AttentionMetadata.build(
            starts=starts,
            num_tokens=[len(ids) for ids in new.values()],
            block_ids=[self.block_ids[name] for name in new],
            block_size=self.block_size,
            device=CPU,
        )
        positions = [p for start, ids in zip(starts, new.values(), strict=True) for p in range(start, start + len(ids))]
        context = ForwardContext(torch.tensor(positions), attention, self.kv, self._states(starts, new))
        hidden = self.model(torch.tensor([t for ids in new.values() for t in ids]), context)
        logits = self.model.logits(hidden).split([len(ids) for ids in new.values()])
        return dict(zip(new, logits, strict=True))

    def _states(self, starts: list[int], new: dict[str, list[int]]) -> StateSequences | None:
        if self.kv.states is None:
            return None
        rows, found = 0, []
        for start, (name, ids) in zip(starts, new.items(), strict=True):
            slot = self.slots.setdefault(name, len(self.slots))
            found.append(StateSequence(rows, len(ids), slot if start else NO_STATE, slot))
            rows += len(ids)
        return StateSequences(found)


def in_mixed_passes(
    model: CausalLM, sequences: dict[str, list[int]], *, block_size: int = 4, kept: ModelConfig | None = None
) -> dict[str, torch.Tensor]:
    """Return each sequence's logits [n, V], computed in passes that mix prompts, chunks and decodes."""
    done: dict[str, list[torch.Tensor]] = defaultdict(list)
    cache = Cache(model, block_size=block_size, kept=kept)
    cuts = [
        {"a": (0, 12), "b": (0, 7)},  # two prompts
        {"c": (0, 9), "a": (12, 13)},  # a prompt beside a decode
        {"a": (13, 14), "d": (0, 1), "e": (0, 32), "c": (9, 17)},
        {"a": (14, 30), "e": (32, 33), "c": (17, 18)},
    ]
    for cut in cuts:
        logits = cache.run({name: sequences[name][slice(*bounds)] for name, bounds in cut.items()})
        for name, part in logits.items():
            done[name].append(part)
    return {name: torch.cat(parts) for name, parts in done.items()}


def held_weights(layer) -> list[torch.Tensor]:
    """Return every weight that a model or a layer holds, each once."""
    if isinstance(layer, torch.nn.Parameter):
        return [layer]
    parts = layer if isinstance(layer, (list, tuple)) else vars(layer).values() if hasattr(layer, "__dict__") else ()
    return list({id(weight): weight for part in parts for weight in held_weights(part)}.values())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)


class Parity:
    """Tests that hold for every family."""

    @staticmethod
    def in_bfloat16(pair):
        """Return the oracle's model in bfloat16."""
        return AutoModelForCausalLM.from_pretrained(pair.folder, dtype=torch.bfloat16, attn_implementation="eager")

    def test_a_whole_prompt(self, pair):
        for count in (1, 2, 37):
            ids = tokens(count, seed=count)
            close(Cache(pair.ours).run({"a": ids})["a"], their_logits(pair.theirs, ids))

    def test_chunks_then_single_tokens(self, pair):
        ids = tokens(41)
        cache = Cache(pair.ours)
        parts = [ids[:5], ids[5:6], ids[6:23], ids[23:32], *([token] for token in ids[32:])]
        logits = torch.cat([cache.run({"a": part})["a"] for part in parts])
        close(logits, their_logits(pair.theirs, ids))

    def test_sequences_of_mixed_lengths_in_one_pass(self, pair):
        for name, logits in in_mixed_passes(pair.ours, SEQUENCES).items():
            close(logits, their_logits(pair.theirs, SEQUENCES[name]))

    @needs_extension
    def test_packed_weights_give_the_same_logits(self, pair):
        ours = load(pair.folder, packed=WeightFormats("float32", "float32"))
        for name, logits in in_mixed_passes(ours, SEQUENCES).items():
            close(logits, their_logits(pair.theirs, SEQUENCES[name]))

    @needs_extension
    @pytest.mark.parametrize("formats", FORMATS)
    def test_packed_weights_give_the_same_bits_in_any_company(self, pair, formats):
        ours = load(pair.folder, packed=WeightFormats(*formats))
        for name, logits in in_mixed_passes(ours, SEQUENCES, block_size=16).items():
            cache = Cache(ours, block_size=16)
            alone = torch.cat([cache.run({name: [token]})[name] for token in SEQUENCES[name]])
            assert torch.equal(logits, alone)

    @needs_extension
    def test_layers_in_one_call_give_the_same_bits_as_one_after_another(self, pair):
        ours = load(pair.folder, packed=WeightFormats(*FORMATS[0]))
        in_one_call = in_mixed_passes(ours, SEQUENCES, block_size=16)
        assert ours._packed is not None
        ours._packed = None
        for name, logits in in_mixed_passes(ours, SEQUENCES, block_size=16).items():
            assert torch.equal(logits, in_one_call[name])

    @needs_extension
    @pytest.mark.parametrize("formats", FORMATS)
    def test_weights_from_a_packed_weights_file_give_the_same_bits(self, pair, tmp_path, formats):
        formats = WeightFormats(*formats)
        with closing(open_checkpoint(pair.folder)) as checkpoint:
            pack_model(checkpoint, tmp_path / "slabs", formats)
            memory = map_weights(read_slab_index(tmp_path / "slabs"))
            mapped = load_model(checkpoint, PackedAllocator(torch.float32, CPU, formats, memory))
        expected = in_mixed_passes(load(pair.folder, packed=formats), SEQUENCES)
        for name, logits in in_mixed_passes(mapped, SEQUENCES).items():
            assert torch.equal(logits, expected[name])

    @needs_extension
    @pytest.mark.parametrize(
        ("formats", "num_ranks", "is_mapped"),
        [(FORMATS[0], 2, True), (FORMATS[1], 3, False), (FORMATS[2], 4, False), (FORMATS[3], 3, True)],
    )
    def test_ranks_give_the_same_bits_however_they_share_the_model(self, pair, tmp_path, formats, num_ranks, is_mapped):
        if pair.ours.config.recurrent is not None:
            pytest.skip("models with recurrent layers are not shared")
        formats = WeightFormats(*formats)
        expected = in_mixed_passes(load(pair.folder, packed=formats), SEQUENCES, block_size=16)
        if is_mapped:
            with closing(open_checkpoint(pair.folder)) as checkpoint:
                pack_model(checkpoint, tmp_path / "slabs", formats)

        def logits_of(group, layouts):
            memory = map_weights(read_slab_index(tmp_path / "slabs")) if is_mapped else FreshMemory()
            parallel, config = ParallelConfig(num_ranks=group.size, **layouts), pair.ours.config
            ranks = ExpertRanks.of(config, parallel, group, range(config.num_layers))
            sharing = {"home": home_on_ranks(group, ranks)}
            if parallel.attention_layout == "tensor":
                sharing["tensor_group"] = group
            model = load(pair.folder, packed=formats, memory=memory, **sharing)
            kept = with_kv_heads_of(config, parallel, group.rank)
            return in_mixed_passes(model, SEQUENCES, block_size=16, kept=kept)

        for layouts in layouts_of(pair.ours.config, num_ranks):
            for found in run_ranks(num_ranks, partial(logits_of, layouts=layouts)):
                assert all(torch.equal(found[name], expected[name]) for name in SEQUENCES)

    @pytest.mark.thorough
    @needs_extension
    def test_devices_that_add_up_their_parts_give_the_same_logits(self, pair):
        if pair.ours.config.recurrent is not None:
            pytest.skip("models with recurrent layers are not shared")
        config = pair.ours.config
        expected = in_mixed_passes(pair.ours, SEQUENCES)

        def logits_of(host, layouts):
            parallel, group = ParallelConfig(num_ranks=host.size, **layouts), DeviceGroup(host, CPU)
            allocator = PlanarAllocator(
                torch.float32,
                CPU,
                formats=WeightFormats("float32", "float32"),
                tensor_group=group if parallel.attention_layout == "tensor" else None,
                expert_devices=ExpertDevices(group, parallel.has_slices),
            )
            with closing(open_checkpoint(pair.folder)) as checkpoint:
                model = load_model(checkpoint, allocator)
            return in_mixed_passes(model, SEQUENCES, kept=with_kv_heads_of(config, parallel, group.rank))

        for layouts in layouts_of(config, 2):
            for found in run_ranks(2, partial(logits_of, layouts=layouts)):
                for name in SEQUENCES:
                    close(found[name], expected[name])

    def test_greedy_tokens(self, pair):
        prompts = {"a": tokens(11, 6), "b": tokens(3, 7), "c": tokens(20, 8)}
        cache = Cache(pair.ours)
        new = dict(prompts)
        ours: dict[str, list[int]] = defaultdict(list)
        for _ in range(12):
            new = {name: [int(logits[-1].argmax())] for name, logits in cache.run(new).items()}
            for name, ids in new.items():
                ours[name] += ids
        for name, ids in prompts.items():
            theirs = their_logits(pair.theirs, ids + ours[name])  # the likeliest after each token, ours included
            assert ours[name] == theirs[len(ids) - 1 : -1].argmax(-1).tolist()

    def test_bfloat16_errs_no_more_than_transformers(self, pair):
        """By the median over short prompts: where rounding makes a router choose otherwise, one prompt is lost."""
        theirs = self.in_bfloat16(pair)
        ours = load(pair.folder, torch.bfloat16)
        prompts = {str(seed): tokens(8, seed) for seed in range(12)}
        exact, rounded = (their_logits_of_all(model, prompts.values()) for model in (pair.theirs, theirs))
        allowed = (rounded.float() - exact).abs().median()
        error = (torch.stack([*Cache(ours).run(prompts).values()]) - exact).abs().median()
        assert 0 < error < 1.5 * allowed

    def test_parameters_are_counted(self, pair):
        def size(weights):
            return sum(weight.numel() for weight in weights)

        own = dict(pair.theirs.named_parameters())
        saved = own | {name: it for name, it in pair.theirs.named_buffers() if name in pair.theirs.state_dict()}
        matrices = [weight for name, weight in own.items() if weight.dim() > 1 and "correction_bias" not in name]
        assert pair.ours.config.num_parameters == size(matrices)
        assert size(held_weights(pair.ours)) == size(saved.values())
