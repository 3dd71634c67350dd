"""What routers say of text, against transformers' own; however the model is run."""

from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine import expert_store
from moeflow.engine.runner_loading import load_runner
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.train.bare_model import load_bare_model
from moeflow.train.predictors.routed_text import (
    RoutedText,
    decoder_router_logits,
    routed,
    routed_answers,
    router_logits,
)
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch

TOKENS = [[5, 9, 200, 31, 7, 7, 100], list(range(30, 90)), [3]]
needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return folder, write_tiny_mixtral(folder, num_local_experts=8, num_hidden_layers=3)


def oracle(target, token_ids):
    with torch.no_grad():
        return torch.stack(target[1](torch.tensor([token_ids]), output_router_logits=True).router_logits, dim=1)


def check(target, model):
    for token_ids in TOKENS:
        torch.testing.assert_close(router_logits(model, token_ids), oracle(target, token_ids), rtol=1e-3, atol=1e-3)


def test_routers_of_a_plain_model(target):
    with closing(open_checkpoint(target[0])) as checkpoint:
        check(target, load_bare_model(checkpoint))


@needs_kernels
def test_routers_of_a_model_that_kernels_run(target):
    config = resolve(Settings(model=str(target[0]), num_threads=1, kv_cache_bytes=2**20, dtype="float32")).config
    with closing(load_runner(config)) as runner:
        assert runner.model.tells_inputs
        check(target, runner.model)


@needs_kernels
def test_routers_of_a_model_whose_experts_come_from_disk(target, tmp_path, monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    with closing(load_runner(streamed_config(str(target[0]), tmp_path / "slabs", 5, dtype="float32"))) as runner:
        check(target, runner.model)


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switch")
    return folder, write_tiny_switch(folder, num_experts=8)


def encoder_oracle(model, token_ids):
    """Return what transformers' routers of the encoder say."""
    heard = []
    routers = [module for name, module in model.encoder.named_modules() if name.endswith("router.classifier")]
    hooks = [router.register_forward_hook(lambda _, __, logits: heard.append(logits[0])) for router in routers]
    with torch.no_grad():
        model.encoder(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(heard, dim=1)


@needs_kernels
@pytest.mark.parametrize("num_slots", [None, 7])
def test_routers_of_an_encoder(switch, tmp_path, monkeypatch, num_slots):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    if num_slots is None:
        config = resolve(Settings(model=str(switch[0]), num_threads=1, kv_cache_bytes=2**20, dtype="float32")).config
    else:
        config = streamed_config(str(switch[0]), tmp_path / "slabs", num_slots, dtype="float32")
    with closing(load_runner(config)) as runner:
        networks = [layer.mlp for layer in runner.model.encoder_layers]
        for token_ids in TOKENS:
            said = router_logits(runner.model, token_ids)
            assert said.shape[1] == runner.model.config.num_encoder_moe_layers == 2
            torch.testing.assert_close(said, encoder_oracle(switch[1], token_ids), rtol=1e-3, atol=1e-3)
        assert [layer.mlp for layer in runner.model.encoder_layers] == networks


def test_the_likeliest_experts_are_kept_in_order(target):
    with closing(open_checkpoint(target[0])) as checkpoint:
        model = load_bare_model(checkpoint)
    told = []
    text = RoutedText.joined([routed(model, TOKENS[:1], 3, told.append), routed(model, TOKENS[1:], 3, told.append)])
    assert told == [7, 60, 1] == text.lengths.tolist()
    assert text.token_ids.tolist() == [token_id for token_ids in TOKENS for token_id in token_ids]
    expected = torch.cat([oracle(target, token_ids) for token_ids in TOKENS]).sort(dim=-1, descending=True)
    assert torch.equal(text.experts.long(), expected.indices[..., :3])
    torch.testing.assert_close(text.logits.float(), expected.values[..., :3], rtol=1e-3, atol=1e-3)


def decoder_oracle(model, given, own):
    """Return what transformers' routers of the decoder say."""
    heard = []
    routers = [module for name, module in model.decoder.named_modules() if name.endswith("router.classifier")]
    hooks = [router.register_forward_hook(lambda _, __, logits: heard.append(logits[0])) for router in routers]
    with torch.no_grad():
        model(input_ids=torch.tensor([given]), decoder_input_ids=torch.tensor([own]))
    for hook in hooks:
        hook.remove()
    return torch.stack(heard, dim=1)


@needs_kernels
@pytest.mark.parametrize("num_slots", [None, 7])
def test_routers_of_a_decoder_behind_an_encoder(switch, tmp_path, monkeypatch, num_slots):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    if num_slots is None:
        config = resolve(Settings(model=str(switch[0]), num_threads=1, kv_cache_bytes=2**20, dtype="float32")).config
    else:
        config = streamed_config(str(switch[0]), tmp_path / "slabs", num_slots, dtype="float32")
    pairs = [(TOKENS[0], [0, 9, 4]), (TOKENS[1], [0]), (TOKENS[2], [0, *range(40, 75)])]
    with closing(load_runner(config)) as runner:
        text = routed_answers(runner.model, pairs, 3, lambda _: None)
        start = 0
        for given, own in pairs:
            expected = decoder_oracle(switch[1], given, own)
            found = decoder_router_logits(runner.model, given, own)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            end = start + len(given) + len(own)
            assert text.token_ids[start:end].tolist() == [*given, *own]
            assert text.is_known[start:end].tolist() == [False] * len(given) + [True] * len(own)
            assert torch.equal(text.known_experts([slice(start, end)]), found.topk(3).indices)
            assert torch.equal(text.known_logits([slice(start, end)]), found.topk(3).values.half())
            start = end
    assert text.lengths.tolist() == [len(given) + len(own) for given, own in pairs]
