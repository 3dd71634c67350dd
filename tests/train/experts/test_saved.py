"""The file of trained experts: rounding, the choice of components, and its size."""

import pytest
import torch
from safetensors import safe_open

from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.train.builtin import EXPERTS_FILE
from moeflow.train.experts.adapters import MATRICES, Adapters
from moeflow.train.experts.saved import TrainedExperts, load_experts, save_experts
from tests.tiny_llama import LAYERS
from tests.train.experts.factors import random_adapters

EXPERTS, RANK = 3, 4
PLENTY = 2**20


@pytest.fixture
def experts():
    generator = torch.Generator().manual_seed(0)
    adapters = random_adapters(EXPERTS, RANK, hidden=96, inner=160)
    return TrainedExperts(adapters, [torch.randn(EXPERTS, 96, generator=generator) for _ in range(LAYERS)])


def changes(experts):
    """Return all changes of matrices, of all layers and experts."""
    return [a @ b for layer in range(LAYERS) for name in MATRICES for a, b in [experts.adapters.of(layer, name)]]


def error(experts, other):
    """Return the root mean square error as a share of the changes' size."""
    ours, theirs = (torch.cat([each.flatten() for each in changes(them)]) for them in (experts, other))
    return float((ours - theirs).norm() / ours.norm())


def saved(experts, file, max_bytes):
    save_experts(file, "mine", experts, max_bytes)
    loaded = load_experts(file, "mine")
    assert file.stat().st_size <= max_bytes
    return loaded


def test_with_room_for_all_only_rounding_is_lost(experts, tmp_path):
    loaded = saved(experts, tmp_path / "experts.safetensors", PLENTY)
    assert error(experts, loaded) < 0.015
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(experts.routers, loaded.routers, strict=True))
    assert load_experts(tmp_path / "experts.safetensors", "others") is None


def test_with_less_room_the_strongest_components_stay(experts, tmp_path):
    """The best approximation of a given number of components over all matrices: Eckart and Young."""
    strengths = torch.cat([torch.linalg.svdvals(change)[:, :RANK].flatten() for change in changes(experts)])
    for max_bytes in (14_000, 17_000, 20_000):
        loaded = saved(experts, tmp_path / f"{max_bytes}.safetensors", max_bytes)
        kept = sum(int((torch.linalg.svdvals(change) > 1e-3).sum()) for change in changes(loaded))
        assert 0 < kept < len(strengths)
        lost = strengths.sort().values[: len(strengths) - kept].square().sum().sqrt() / strengths.norm()
        assert error(experts, loaded) == pytest.approx(float(lost), abs=0.01)


def test_a_weak_expert_may_keep_nothing(experts, tmp_path):
    factors = {name: each.clone() for name, each in experts.adapters.factors.items()}
    for each in factors.values():
        each[1] *= 1e-3
    loaded = saved(TrainedExperts(Adapters(factors), experts.routers), tmp_path / "e.safetensors", 15_000)
    assert all(not change[1].any() and change[0].any() for change in changes(loaded))


def test_too_few_bytes_are_a_clear_error(experts, tmp_path):
    with pytest.raises(ConfigError, match="allow more"):
        save_experts(tmp_path / "experts.safetensors", "mine", experts, 2000)


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_file_is_a_clear_error(experts, tmp_path, damage):
    file = tmp_path / "experts.safetensors"
    save_experts(file, "mine", experts, PLENTY)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match="Install moeflow again"):
        load_experts(file, "mine")


def test_the_packages_file_is_whole():
    with safe_open(EXPERTS_FILE, "pt") as opened:
        fingerprint = opened.metadata()["fingerprint"]
    assert len(load_experts(EXPERTS_FILE, fingerprint).routers) == 30


def test_other_experts_have_another_header(experts, tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    turned = TrainedExperts(experts.adapters, [-router for router in experts.routers])
    for file, them in zip(files, (experts, turned), strict=True):
        save_experts(file, "mine", them, PLENTY)
    sizes = {int.from_bytes(file.read_bytes()[:8], "little") for file in files}
    assert len({file.read_bytes()[8 : 8 + max(sizes)] for file in files}) == 2
