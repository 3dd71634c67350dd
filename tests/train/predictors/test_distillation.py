"""From a model's folder to a predictor's: files kept when work stops, and refused settings."""

import json
from contextlib import closing

import pytest
from click.testing import CliRunner

from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli.main import main
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.models.expert_predictor.saved import decoder_folder, is_saved, load_predictor, predictor_folder
from moeflow.settings.settings import Settings
from moeflow.train.loop import TrainingLoop
from moeflow.train.phases import Phase
from moeflow.train.predictors import collecting, distillation
from moeflow.train.predictors.distillation import train_predictor
from moeflow.train.predictors.recipe import PredictorRecipe
from moeflow.train.speculators import teacher_text
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.tiny_switch import write_tiny_switch, write_tiny_t5

QUICK = {"epochs": 3, "learning_rate": 1e-2, "batch_size": 8, "hidden_size": 16, "window": 64}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{number} and {number * 7} are numbers.\n" for number in range(1000)))
    return file


def train(model, data, **more):
    recipe = PredictorRecipe(**(QUICK | more.pop("recipe", {})))
    settings = Settings(model=str(model), num_threads=1, kv_cache_bytes=2**20)
    return train_predictor(settings, recipe, data=data, **more)


def test_work_that_was_stopped_goes_on(model, data, monkeypatch):
    folder = predictor_folder(model)
    whole = train(model, data)
    assert is_saved(folder)
    assert whole.folder == folder
    assert whole.held_out_tokens * 5 < whole.text_tokens
    assert len(whole.hit_rates.top_k) == 2
    assert not (folder / ".training").exists()

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(TrainingLoop, "_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(model, data, overwrite=True)
    # The text is there: no model is run for it again, whatever stops the later steps.
    monkeypatch.setattr(teacher_text.Engine, "over", stop)
    with pytest.raises(ConfigError, match="another epochs"):
        train(model, data, recipe={"epochs": 2}, overwrite=True)
    with monkeypatch.context() as broken:
        broken.setattr(distillation, "save_predictor", stop)
        with pytest.raises(KeyboardInterrupt):
            train(model, data, overwrite=True)
    with monkeypatch.context() as counted:
        counted.setattr(TrainingLoop, "_step", stop)  # all steps are made
        again = train(model, data)
    assert again == whole
    with pytest.raises(ConfigError, match="--overwrite"):
        train(model, data)
    with pytest.raises(KeyboardInterrupt):
        train(model, data, overwrite=True)


def test_the_model_says_what_is_learnt_from(model, monkeypatch):
    monkeypatch.setattr("moeflow.train.predictors.learning_text.SEQUENCE_TOKENS", 8)
    told = []
    trained = train(
        model, None, recipe={"text_tokens": 100, "epochs": 1}, on_progress=lambda *progress: told.append(progress)
    )
    assert trained.text_tokens >= 100
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == [Phase.LOADING, Phase.TEXT, Phase.TRAINING]
    assert all(0 <= done <= total for _, done, total in told)


def test_what_cannot_work_is_refused(model, data, tmp_path):
    dense = tmp_path / "dense"
    dense.mkdir()
    write_tiny_llama(dense)
    with pytest.raises(ConfigError, match="no experts"):
        train(dense, data)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError):
        train(empty, data)
    for name, value in (("epochs", 0), ("minutes", 0.0), ("learning_rate", 0.0), ("window", 0)):
        with pytest.raises(ConfigError, match=name.split("_")[0]):
            PredictorRecipe(**{name: value})


def test_an_encoder_is_learnt_from_inputs(tmp_path, monkeypatch):
    folder = tmp_path / "switch"
    folder.mkdir()
    write_tiny_switch(folder)
    with pytest.raises(ConfigError, match="--data"):
        train(folder, None)
    table = tmp_path / "train.tsv"
    table.write_text("".join(f"{number} is a number\t{number % 2}\n" for number in range(100, 200)))
    lengths, found, made = [], [], []
    routed = collecting.routed

    def overheard(model, sequences, *rest, are_found):
        lengths.extend(map(len, sequences))
        (made if not are_found else found).extend(sequences)
        return routed(model, sequences, *rest, are_found=are_found)

    monkeypatch.setattr(collecting, "routed", overheard)
    trained = train(folder, table, recipe={"epochs": 12})
    assert len(found) == 100
    assert len(made) == 128  # whole rounds, until it is as much
    replaced = [
        a != b for text in made for a, b in zip(text, min(found, key=lambda it: _distance(it, text)), strict=True)
    ]
    assert 0.1 < sum(replaced) / len(replaced) < 0.3
    assert {*lengths} == {len("100 is a number")}
    assert len(trained.hit_rates.top1) == 2  # the decoder has a predictor of its own
    assert trained.decoder is not None
    assert trained.decoder.folder == decoder_folder(predictor_folder(folder))
    assert len(trained.decoder.hit_rates.top1) == 1
    figures = json.loads((trained.folder / "predictor.json").read_text())["measured"]
    assert "decoder" not in figures
    assert trained.hit_rates.mean()["top1"] > trained.hit_rates.mean()["most_used"]
    with closing(open_checkpoint(folder)) as checkpoint:
        assert load_predictor(trained.folder, checkpoint).shape.num_layers == 2
        of_decoder = load_predictor(trained.decoder.folder, checkpoint)
    assert (of_decoder.shape.num_layers, of_decoder.shape.is_causal) == (1, True)
    write_tiny_t5(folder)
    with pytest.raises(ConfigError, match="no experts"):
        train(folder, table)


def test_what_was_stopped_at_the_decoder_goes_on_there(tmp_path, monkeypatch):
    folder = tmp_path / "switch"
    folder.mkdir()
    write_tiny_switch(folder)
    table = tmp_path / "train.tsv"
    table.write_text("".join(f"{number} is a number\t0\n" for number in range(100, 180)))
    train_part = distillation._train_part

    def stop(checkpoint, part, *rest):
        if part.is_behind_encoder:
            part.work.mkdir(parents=True, exist_ok=True)
            (part.work / "recipe.json").write_text("{}")
            raise KeyboardInterrupt
        return train_part(checkpoint, part, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(distillation, "_train_part", stop)
        with pytest.raises(KeyboardInterrupt):
            train(folder, table)
    (decoder_folder(predictor_folder(folder)) / ".training" / "recipe.json").unlink()
    with pytest.raises(ConfigError, match="--overwrite"):
        train(folder, table)
    with monkeypatch.context() as broken:
        broken.setattr(distillation, "_train_part", stop)
        with pytest.raises(KeyboardInterrupt):
            train(folder, table, overwrite=True)
    done = []
    (decoder_folder(predictor_folder(folder)) / ".training" / "recipe.json").write_text("{}")
    monkeypatch.setattr(distillation, "_train_part", lambda checkpoint, part, *rest: done.append(part) or FINISHED)
    assert train(folder, table) is FINISHED
    assert [part.is_behind_encoder for part in done] == [True]


FINISHED = object()


def _distance(one, other):
    return sum(a != b for a, b in zip(one, other, strict=True))


def test_the_command_prints_what_it_made(model, data):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (QUICK | {"epochs": 1}).items()]
    arguments = ["train", "predictor", str(model), "--data", str(data), *options]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["predictor"] == str(model / "predictor")
    assert 0 < result["mean_hit_rates"]["top_k"] <= 1
    assert json.loads((model / "predictor" / "predictor.json").read_text())["measured"]["epochs"] == 1
    again = CliRunner().invoke(main, [*arguments, "--overwrite"])
    assert again.exit_code == 0
    assert "--predictor sida" in again.stdout
