import json

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main
from moeflow.planner.planning import plan_for_start
from moeflow.settings.settings import Settings
from tests.tiny_mixtral import write_tiny_mixtral

QUICK = ("--text-tokens", "200", "--steps", "3", "--layers", "1", "--pool", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_tiny_mixtral(folder)
    return folder


def run(model, *options):
    return CliRunner().invoke(main, ["train", "speculator", str(model), *options])


def reasons(model, *speculators, **more):
    plan = plan_for_start(Settings(model=str(model), speculators=speculators, **more))
    return plan.config, dict(plan.reasons)


@pytest.mark.slow
def test_trains_a_pool_that_auto_takes(model):
    assert reasons(model, "auto")[0].speculators == ("suffix",)
    done = run(model, *QUICK, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    folders = [str(model / "speculators" / number) for number in "12"]
    assert result["speculators"] == folders
    assert result["coverage"]["top1"][0] <= result["coverage"]["top1"][1] <= result["coverage"]["top3"][1]
    assert not (model / "speculators" / ".training").exists()
    config, why = reasons(model, "auto")
    assert config.speculators == ("suffix", *folders)
    assert "2 of 2" in why["speculators (auto)"]
    again = run(model, *QUICK)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_what_cannot_work_is_said_in_one_line(model, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    short = run(model, "--data", str(tmp_path / "short.txt"))
    assert (short.exit_code, "too little text" in short.stderr) == (2, True)
    assert run(model, "--pool", "0").exit_code == 2
    (tmp_path / "file").write_text("")
    taken = run(model, "--out", str(tmp_path / "file" / "in"))
    assert (taken.exit_code, "cannot write" in taken.stderr) == (2, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(empty).exit_code == 2
