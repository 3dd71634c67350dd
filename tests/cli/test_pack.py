import json
import shutil
from contextlib import closing

import pytest
import torch
from click.testing import CliRunner

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.cli.main import main
from moeflow.core.units import MIB
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.saved import folders_of, load_predictor, predictor_folder, save_predictor
from moeflow.planner import resolve
from moeflow.planner.costs.process_memory import PROCESS_BYTES
from moeflow.planner.hardware.host import HostResources
from moeflow.train import routing_learning
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
    pytest.mark.usefixtures("little_text"),
]


def test_writes_a_file_and_says_what_is_in_it(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    arguments = ["pack", str(tmp_path / "model"), "--quantize", "int8", "--cache-dir", str(tmp_path / "cache")]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    index = read_slab_index((tmp_path / "cache").rglob("*.slabs").__next__())
    assert result["path"] == str(index.path)
    assert (result["layers"], result["experts"], result["weight_format"]) == (2, 4, "int8")
    assert result["size_bytes"] == index.path.stat().st_size
    again = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "mine")])
    assert again.stdout.startswith(f"{tmp_path / 'mine'}: 2 layers of 4 experts, ")
    assert ", in int8, " in again.stdout


def test_a_network_beside_the_model_is_carried_and_anothers_is_not(tmp_path):
    for name, seed in (("model", 0), ("other", 1)):
        write_tiny_mixtral(tmp_path / name, seed=seed)
    shape = PredictorShape(embedding_size=32, num_layers=2, num_experts=4, top_k=2, hidden_size=16)
    with closing(open_checkpoint(tmp_path / "model")) as checkpoint:
        save_predictor(ExpertPredictor(shape), checkpoint, predictor_folder(tmp_path / "model"), {"epochs": 3})
        own = load_predictor(predictor_folder(tmp_path / "model"), checkpoint).state_dict()
    arguments = ["pack", str(tmp_path / "model"), "--cache-dir", str(tmp_path), "--out", str(tmp_path / "far" / "it")]
    (tmp_path / "far").mkdir()
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    carried = tmp_path / "far" / "it.predictor"
    assert json.loads(done.stdout)["predictor"] == str(carried)
    shutil.rmtree(predictor_folder(tmp_path / "model"))
    with closing(open_checkpoint(tmp_path / "model")) as checkpoint:
        assert folders_of(checkpoint.path, tmp_path / "far" / "it")[0] == carried
        found = load_predictor(carried, checkpoint).state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in own.items())
    assert json.loads((carried / "predictor.json").read_text())["measured"] == {"epochs": 3}
    assert "its experts lies" not in CliRunner().invoke(main, arguments).stdout  # there is none next to the model now
    shutil.copytree(carried, predictor_folder(tmp_path / "other"))
    arguments = ["pack", str(tmp_path / "other"), "--cache-dir", str(tmp_path), "--out", str(tmp_path / "other.slabs")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert "belongs to another model" in done.stderr
    assert not (tmp_path / "other.slabs.predictor").exists()


def test_a_model_without_a_tokenizer_is_packed_and_told_that_nothing_was_learnt(tmp_path):
    model = tmp_path / "model"
    write_tiny_mixtral(model)
    (model / "tokenizer.json").unlink()
    done = CliRunner().invoke(main, ["pack", str(model), "--cache-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["routing_tokens"] == 0
    assert "How its routers choose could not be learnt" in done.stderr
    assert "tokenizer.json" in done.stderr


@pytest.mark.slow
def test_what_is_learnt_comes_from_the_file_that_was_packed_where_float32_has_no_room(tmp_path, monkeypatch):
    """The free memory holds the weights in bfloat16, but packing and streaming keep the float32 of the checkpoint."""
    write_tiny_mixtral(tmp_path / "model", intermediate_size=4096, num_local_experts=8)
    room = HostResources(1, 2**40, PROCESS_BYTES + 16 * MIB, None, 0, process_bytes=64 * MIB)
    for module in (resolve, routing_learning):
        monkeypatch.setattr(module, "host_resources", lambda *_: room)
    done = CliRunner().invoke(main, ["pack", str(tmp_path / "model"), "--cache-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["weight_format"] == "float32"
    assert json.loads(done.stdout)["routing_tokens"] == 200, done.stderr
    assert len([*tmp_path.rglob("*.slabs")]) == 1
