"""Training of, and learning about, models with recurrent layers, against transformers' own; refused models."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.runner_loading import load_runner
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.saved import is_saved, predictor_folder
from moeflow.planner.resolve import resolve
from moeflow.planner.simulator.routing_study import study_routing
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train import routing_learning
from moeflow.train.bare_model import load_bare_model, run_sequence, sequences_context
from moeflow.train.perplexity import perplexity
from moeflow.train.predictors.distillation import PredictorRecipe, train_predictor
from moeflow.train.predictors.routed_text import router_logits
from moeflow.train.routing_learning import ensure_profile, learning_text
from moeflow.train.speculators.distillation import SpeculatorRecipe, train_speculators
from tests.engine.streamed_runs import answers, follow_all, run
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_granite_hybrid import write_tiny_granite_hybrid
from tests.tiny_lfm2 import write_tiny_lfm2

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
TEXTS = [list(range(30, 90)), [3], [5, 9, 200, 31, 7, 7, 100]]


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    return folder, write_tiny_granite_hybrid(folder)


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)


@torch.no_grad()
def oracle_logits(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0]


@torch.no_grad()
def oracle_routers(model, token_ids):
    """Return what transformers' routers say, [T, layers, E]."""
    heard = []
    routers = [module for name, module in model.named_modules() if name.endswith("block_sparse_moe.router")]
    hooks = [router.register_forward_hook(lambda _, __, out: heard.append(out[0])) for router in routers]
    model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(heard, dim=1)


@pytest.mark.parametrize("write", [write_tiny_lfm2, write_tiny_granite_hybrid])
def test_sequences_run_without_an_engine(tmp_path, write):
    theirs = write(tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        model = load_bare_model(checkpoint)
    for text in TEXTS:
        found = model.logits(run_sequence(model, text))
        torch.testing.assert_close(found, oracle_logits(theirs, text), atol=1e-3, rtol=1e-3)
    with torch.inference_mode():
        context = sequences_context(model, [len(text) for text in TEXTS])
        together = model.logits(model(torch.tensor([token for text in TEXTS for token in text]), context))
    expected = torch.cat([oracle_logits(theirs, text) for text in TEXTS])
    torch.testing.assert_close(together, expected, atol=1e-3, rtol=1e-3)
    logprobs = oracle_logits(theirs, TEXTS[0]).log_softmax(dim=-1)[:-1]
    loss = -logprobs.gather(1, torch.tensor(TEXTS[0][1:])[:, None]).mean()
    assert perplexity(model, TEXTS[:1]) == pytest.approx(float(loss.exp()), rel=1e-3)


def test_routers_say_what_transformers_say(granite, tmp_path):
    folder, theirs = granite
    with closing(open_checkpoint(folder)) as checkpoint:
        models = [load_bare_model(checkpoint)]
    configs = []
    if extension.is_available():
        settings = Settings(model=str(folder), num_threads=1, kv_cache_bytes=2**20, dtype="float32")
        configs = [resolve(settings).config, streamed_config(str(folder), tmp_path / "slabs", 5, dtype="float32")]
    for text in TEXTS:
        expected = oracle_routers(theirs, text)
        for model in models:
            torch.testing.assert_close(router_logits(model, text), expected, rtol=1e-3, atol=1e-3)
        for config in configs:
            with closing(load_runner(config)) as runner:
                torch.testing.assert_close(router_logits(runner.model, text), expected, rtol=1e-3, atol=1e-3)


@needs_kernels
def test_a_predictor_is_trained_and_followed_with_the_same_tokens(granite, tmp_path):
    folder, _ = granite
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{number} and {number * 7} are numbers.\n" for number in range(300)))
    recipe = PredictorRecipe(epochs=1, learning_rate=1e-2, batch_size=8, hidden_size=16, window=64)
    settings = Settings(model=str(folder), num_threads=1, kv_cache_bytes=2**20)
    trained = train_predictor(settings, recipe, data=data)
    assert is_saved(predictor_folder(folder))
    assert len(trained.hit_rates.top_k) == 3
    expected = run(streamed_config(str(folder), tmp_path / "slabs", 7, dtype="float32"))
    config = streamed_config(str(folder), tmp_path / "slabs", 7, predictor="sida", dtype="float32")
    engine = Engine.load(config)
    follow_all(engine._runner.experts.prefetch)
    assert answers(engine) == (expected, {})
    assert engine._runner.experts.cache.stats().prefetched_bytes > 0
    engine.close()


@needs_kernels
def test_how_routers_choose_is_learnt(granite, tmp_path, monkeypatch):
    folder, theirs = granite
    monkeypatch.setattr(routing_learning, "NUM_TOKENS", 200)
    studied = []
    monkeypatch.setattr(
        routing_learning, "study_routing", lambda ids, *rest: studied.append(ids) or study_routing(ids, *rest)
    )
    settings = Settings(model=str(folder), cache_dir=tmp_path, num_threads=1, kv_cache_bytes=2**20, dtype="float32")
    assert ensure_profile(settings).num_tokens == 200
    tokens = learning_text(Tokenizer.load(str(folder)))[:200]
    expected = oracle_routers(theirs, tokens).topk(2, dim=-1).indices.sort(dim=-1).values.transpose(0, 1)
    found = torch.from_numpy(studied[0].astype("int64")).sort(dim=-1).values
    assert (found == expected).float().mean() > 0.995  # but for near ties


@pytest.mark.parametrize("write", [write_tiny_lfm2, write_tiny_granite_hybrid])
def test_speculators_are_not_trained(tmp_path, write):
    write(tmp_path)
    with pytest.raises(ConfigError, match="recurrent layers, whose states cannot be rolled back"):
        train_speculators(Settings(model=str(tmp_path)), SpeculatorRecipe(), out=tmp_path / "out")
    assert not list(tmp_path.glob("out/[0-9]*"))
