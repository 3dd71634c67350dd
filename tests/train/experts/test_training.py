"""`upcycle --train` on a tiny random Llama: the same model as transformers computes, and the same bits after a stop."""

import shutil
import signal
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import MixtralForCausalLM

from moeflow.checkpoint import atomic_folder
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.models.registry import read_model_config
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.experts import training
from moeflow.train.experts.adapters import Adapters
from moeflow.train.experts.network import ExpertNetwork
from moeflow.train.experts.recipe import ExpertRecipe
from moeflow.train.experts.routers import fit_domain_router
from moeflow.train.experts.saved import TrainedExperts
from moeflow.train.experts.task import ExpertTask, balance_loss, cut
from moeflow.train.experts.texts import learning_texts, measured_text, named_files
from moeflow.train.experts.training import train_experts, work_place
from moeflow.train.phases import Phase
from moeflow.train.speculators.student import student_from
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycling import space_needed, upcycle
from moeflow.train.upcycling_quality import measure_quality
from moeflow.train.work_folder import work_folder
from tests.tiny_llama import HIDDEN, LAYERS, VOCAB, write_tiny_llama
from tests.train.experts.factors import random_adapters

RECIPE = ExpertRecipe(rank=4, steps=6, joint_steps=2, learning_rate=0.1)
TEXTS = {
    "code": "def f(x): return {x: [x]}\n" * 30,
    "french": "Où est la gare ? Il y a du pain et du vin.\n" * 24,
    "sums": "11+22=33; 44+55=99; 12+12=24\n" * 30,
}
PHASES = [Phase.READING, Phase.BRANCHES, Phase.ROUTERS, Phase.JOINT, Phase.WRITING]


@pytest.fixture(autouse=True)
def in_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return named_files([str(folder / f"{name}.txt") for name in TEXTS])


@pytest.fixture(scope="module")
def trained(llama, files, tmp_path_factory):
    """Return the result and the reports of progress."""
    out = tmp_path_factory.mktemp("made") / "moe"
    reports = []
    with pytest.MonkeyPatch.context() as listening:
        listening.setattr(training, "training_dtype", lambda: torch.float32)
        train_experts(llama, out, RECIPE, files, on_progress=lambda *report: reports.append(report))
    return out, reports


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def different_experts():
    """Return experts with changes as large as the weights, and routers that choose among all."""
    factors = {name: each * 0.3 for name, each in random_adapters(3, 4).factors.items()}
    generator = torch.Generator().manual_seed(1)
    return TrainedExperts(Adapters(factors), [torch.randn(3, HIDDEN, generator=generator) for _ in range(LAYERS)])


def expert_network(llama, experts, dtype=torch.float32):
    with closing(open_checkpoint(llama)) as checkpoint:
        dense = student_from(checkpoint, LAYERS, dtype)
    return ExpertNetwork(dense.shape, dense.weights, experts.adapters, experts.routers, 2)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.02), (torch.bfloat16, 0.05)])
def test_training_computes_what_transformers_does_on_the_result(llama, tmp_path, dtype, tolerance):
    """The file has bf16 weights, hence the tolerance, a share of the logits' spread."""
    pieces = [torch.tensor(Tokenizer.load(llama).encode(text)[:60]) for text in TEXTS.values()]
    upcycle(llama, tmp_path / "moe", UpcycleRecipe(num_experts=3, top_k=2), trained=different_experts())
    oracle = MixtralForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    expected = torch.cat([oracle(piece[None]).logits[0] for piece in pieces])
    ours = expert_network(llama, different_experts(), dtype)

    def error(network):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = network.hidden(torch.cat(pieces), [len(piece) for piece in pieces])
            logits = torch.nn.functional.linear(hidden, network.head).float()
        return float((logits - expected).square().mean().sqrt() / expected.std())

    assert error(ours) < tolerance
    assert error(replace(ours, routers=[router.roll(1, 0) for router in ours.routers])) > 4 * tolerance
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
    predicted = torch.cat([piece[1:] for piece in pieces])
    is_end = torch.zeros(len(expected), dtype=torch.bool).scatter(0, ends, True)
    loss = torch.nn.functional.cross_entropy(expected[~is_end], predicted)
    assert float(ours.mean_loss(pieces)) == pytest.approx(float(loss), abs=2 * tolerance)


def test_each_expert_is_best_on_its_text_and_order_matters(llama, files, trained):
    quality = measure_quality(llama, trained[0], read_texts=partial(measured_text, files=files))
    assert [text.name for text in quality.texts] == list(TEXTS)
    for number, text in enumerate(quality.texts):
        assert text.moe_perplexity < 0.95 * text.dense_perplexity
        assert text.permuted_perplexity > 1.05 * text.moe_perplexity
        assert max(text.expert_shares) == text.expert_shares[number]
        assert sum(text.expert_shares) == pytest.approx(1.0)
        assert 0.0 < text.routing_entropy < 1.1  # log 3
    assert quality.mean_ratio < 0.95


def test_progress_runs_through_all_phases_to_their_ends(trained):
    assert list(dict.fromkeys(phase for phase, _, _ in trained[1])) == PHASES
    for phase in PHASES:
        counts = [(done, total) for each, done, total in trained[1] if each == phase]
        assert counts == sorted(counts)
        assert counts[-1][0] == counts[-1][1]
    assert not work_place(trained[0]).exists()


@pytest.mark.parametrize(
    ("phase", "at", "is_killed"),
    [
        (Phase.BRANCHES, 8, False),
        (Phase.JOINT, 1, True),
        pytest.param(Phase.BRANCHES, 2, True, marks=pytest.mark.thorough),
        pytest.param(Phase.ROUTERS, 1, False, marks=pytest.mark.thorough),
        pytest.param(Phase.JOINT, 1, False, marks=pytest.mark.thorough),
        pytest.param(Phase.WRITING, 0, True, marks=pytest.mark.thorough),
    ],
)
def test_a_stopped_training_resumes_to_the_same_bits(
    llama, files, trained, tmp_path, monkeypatch, phase, at, is_killed
):
    monkeypatch.setattr(training, "training_dtype", lambda: torch.float32)

    def stop(current, done, total):
        if current == phase and done >= at:
            if is_killed:
                raise MemoryError  # nothing is saved at the last moment
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(MemoryError if is_killed else KeyboardInterrupt):
        train_experts(llama, tmp_path / "moe", RECIPE, files, on_progress=stop)
    assert not (tmp_path / "moe").exists()
    train_experts(llama, tmp_path / "moe", RECIPE, files)
    assert contents(tmp_path / "moe") == contents(trained[0])
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]


def test_unfinished_work_needs_the_same_options_or_restart(llama, files, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    short = ExpertRecipe(rank=1, steps=1, joint_steps=0)
    with pytest.raises(KeyboardInterrupt):
        train_experts(llama, tmp_path / "moe", RECIPE, files, on_progress=stop)
    with pytest.raises(ConfigError, match="another rank, steps, joint_steps, learning_rate"):
        train_experts(llama, tmp_path / "moe", short, files)
    train_experts(llama, tmp_path / "moe", short, files, restart=True)
    assert open_checkpoint(tmp_path / "moe").config["num_local_experts"] == 3
    with pytest.raises(ConfigError, match="exists already"):
        train_experts(llama, tmp_path / "moe", short, files)
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]  # and no empty folder of work


def test_unfinished_work_needs_the_same_contents(llama, files, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    own = {name: shutil.copy(file, tmp_path / file.name) for name, file in files.items()}
    changed = write_tiny_llama(tmp_path / "llama")
    with pytest.raises(KeyboardInterrupt):
        train_experts(tmp_path / "llama", tmp_path / "moe", RECIPE, own, on_progress=stop)
    own["code"].write_text(TEXTS["code"][::-1])
    with pytest.raises(ConfigError, match="work with another content of the texts"):
        train_experts(tmp_path / "llama", tmp_path / "moe", RECIPE, own, on_progress=stop)
    own["code"].write_text(TEXTS["code"])
    torch.nn.init.normal_(changed.model.layers[0].mlp.up_proj.weight)
    changed.save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="work with another weights of the source"):
        train_experts(tmp_path / "llama", tmp_path / "moe", RECIPE, own, on_progress=stop)


def test_other_files_in_the_place_of_work_stay(llama, files, tmp_path):
    (place := work_place(tmp_path / "moe")).mkdir()
    (place / "data.safetensors").write_bytes(b"mine")
    for restart in (False, True):
        with pytest.raises(ConfigError, match="holds other files"):
            train_experts(llama, tmp_path / "moe", RECIPE, files, restart=restart)
    assert [file.name for file in place.iterdir()] == ["data.safetensors"]


def test_files_that_come_during_work_stay(tmp_path):
    with work_folder(tmp_path / "work") as work:
        work.check_recipe({"rank": 1})
        work.file("part").save({"x": torch.zeros(1)})
        (work.path / "notes.txt").write_text("mine")
        work.clear()
        assert sorted(file.name for file in work.path.iterdir()) == [".lock", "notes.txt"]


def test_a_time_budget_ends_the_training(llama, files, tmp_path):
    train_experts(llama, tmp_path / "moe", ExpertRecipe(rank=1, minutes=0.005), files)
    assert open_checkpoint(tmp_path / "moe").config["num_local_experts"] == 3


def test_bad_texts_and_full_disks_are_clear_errors(llama, files, tmp_path, monkeypatch):
    train = partial(train_experts, llama, tmp_path / "moe", RECIPE)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary.txt").write_bytes(b"x" * 50 + b"\xff\xfe" + b"x" * 50)
    for name, message in (("short", "use at least 40"), ("binary", "not UTF-8"), ("nowhere", "cannot read")):
        with pytest.raises(ConfigError, match=message):
            train(named_files([str(files["code"]), str(tmp_path / f"{name}.txt")]))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(atomic_folder.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CapacityError, match="not enough disk space"):
        train(files)
    assert not work_place(tmp_path / "moe").exists()


def test_other_sources_and_small_memories_are_refused(files, tmp_path, monkeypatch):
    write_tiny_llama(tmp_path / "gelu", hidden_act="gelu")
    with pytest.raises(CheckpointError, match="only 'silu' is supported"):
        train_experts(tmp_path / "gelu", tmp_path / "moe", RECIPE, files)
    write_tiny_llama(tmp_path / "llama")
    host, usage = training.host_resources(), shutil.disk_usage(tmp_path)
    with closing(open_checkpoint(tmp_path / "llama")) as checkpoint:
        weights_bytes = checkpoint.tensors.num_values * 4
        result_bytes = space_needed(checkpoint, read_model_config(checkpoint), UpcycleRecipe(num_experts=3))
    monkeypatch.setattr(training, "training_dtype", lambda: torch.float32)
    for have_bytes in (1000, 2 * weights_bytes + 2048 * VOCAB * 8):  # where weights fit, but not logits
        monkeypatch.setattr(training, "host_resources", lambda have=have_bytes: replace(host, available_bytes=have))
        with pytest.raises(CapacityError, match="not enough memory"):
            train_experts(tmp_path / "llama", tmp_path / "moe", RECIPE, files)
    monkeypatch.setattr(atomic_folder.shutil, "disk_usage", lambda _: usage._replace(free=result_bytes + 1000))
    with pytest.raises(CapacityError, match="not enough disk space"):  # where the result fits, but not the work
        train_experts(tmp_path / "llama", tmp_path / "moe", RECIPE, files)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a.txt"], "add another"),
        (["x=a.txt", "x=b.txt"], "two texts are called x"),
        (["a.txt", "b/a.txt"], "two texts are called a"),
        (["a/b=a.txt", "b.txt"], "no name of a text"),
    ],
)
def test_data_needs_two_names(values, message):
    with pytest.raises(ConfigError, match=message):
        named_files(values)


def test_without_data_the_packages_texts_are_used(llama):
    files = named_files([])
    texts = learning_texts(Tokenizer.load(llama).encode, files)
    assert [text.name for text in texts] == sorted(files)
    assert len(files) == 8


def test_a_router_tells_texts_apart():
    chance = torch.Generator().manual_seed(0)
    centres = torch.randn(4, HIDDEN, generator=chance)
    mean = 5 * torch.randn(HIDDEN, generator=chance)
    inputs = [mean + centre + 0.3 * torch.randn(50, HIDDEN, generator=chance) for centre in centres]
    router = fit_domain_router(inputs)
    for number, each in enumerate(inputs):
        assert ((each @ router.T).argmax(dim=1) == number).float().mean() > 0.95


def test_the_balance_loss_is_least_for_equal_loads():
    even = torch.eye(4).repeat(8, 1) * 9
    assert float(balance_loss(even, 1)) == pytest.approx(1.0)
    assert float(balance_loss(torch.eye(4)[:1].repeat(8, 1) * 9, 1)) == pytest.approx(4.0, rel=0.01)


def test_a_joint_batch_has_a_piece_of_each_text():
    texts = [cut(range(100 * number, 100 * number + 50), 10) for number in (1, 2)] + [cut(range(20), 10)]
    network = ExpertNetwork.__new__(ExpertNetwork)  # batches need no weights
    task = ExpertTask.__new__(ExpertTask)
    task._texts, task._rows, task._seed, task.network = texts, 1, 0, network
    batches = task.batches(0)
    assert [[int(piece[0]) // 100 for piece in batch] for batch in batches] == [[1, 2, 0]] * 5
    assert {int(batch[0][0]) for batch in batches} == {100, 110, 120, 130, 140}
