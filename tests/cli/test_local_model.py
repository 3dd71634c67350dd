from pathlib import Path

import click
import pytest

from moeflow.cli import lazy
from moeflow.cli.local_model import built_in_model, load, prepare
from moeflow.planner.usage import SERVING
from moeflow.settings.settings import Settings
from tests.planner.example_plans import PLAN


@pytest.fixture
def made(monkeypatch):
    """Stand in for the builder: return its request, and a folder for its result."""
    asked: list[Path] = []

    def ensure(cache_dir: Path, on_progress=None) -> Path:
        folder = cache_dir / "builtin"
        if not folder.is_dir():
            asked.append(cache_dir)
            on_progress(1, 2)
            folder.mkdir(parents=True)
        return folder

    monkeypatch.setitem(vars(lazy), "builtin_folder", lambda cache_dir: cache_dir / "builtin")
    monkeypatch.setitem(vars(lazy), "make_builtin_apart", ensure)
    return asked


def overrides(model: str | None, cache_dir: Path) -> dict[str, object]:
    return {"model": model, "dtype": "bfloat16", "max_num_seqs": 3, "cache_dir": cache_dir}


def test_the_built_in_model_is_made_once_and_the_user_told(made, tmp_path, capsys):
    assert built_in_model(tmp_path) == tmp_path / "builtin"
    assert "Making the built-in model" in capsys.readouterr().err
    assert built_in_model(tmp_path) == tmp_path / "builtin"
    assert capsys.readouterr().err == ""
    assert made == [tmp_path]


def test_without_a_model_the_built_in_one_is_prepared(made, tmp_path):
    assert prepare(overrides(None, tmp_path)) == Settings(
        model=str(tmp_path / "builtin"), dtype="bfloat16", max_num_seqs=3, cache_dir=tmp_path
    )


def test_a_model_of_ones_own_needs_nothing_made(made, tmp_path):
    assert prepare(overrides("./my/model", tmp_path)).model == "./my/model"
    assert made == []


@pytest.mark.parametrize("shows_expected", [True, False])
def test_what_is_expected_is_shown_of_what_is_loaded(monkeypatch, tmp_path, capsys, shows_expected):
    asked, loaded = [], []

    def plan_for_start(settings, usage, on_step, resources):
        asked.append(usage)
        return f"plan {len(asked)}"

    class FakeLLM:
        from_plan = staticmethod(lambda plan, on_progress: loaded.append(plan))

    monkeypatch.setitem(vars(lazy), "plan_for_start", plan_for_start)
    monkeypatch.setitem(vars(lazy), "what_to_expect", lambda plan: f"{plan} is fast")
    monkeypatch.setitem(vars(lazy), "LLM", FakeLLM)
    load(overrides("./my/model", tmp_path), SERVING, shows_expected=shows_expected)
    assert (asked, loaded) == ([SERVING], ["plan 1"])
    assert capsys.readouterr().err == ("plan 1 is fast\n" if shows_expected else "")


def test_a_plan_that_is_to_be_explained_is_printed_and_nothing_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(vars(lazy), "plan_for_start", lambda settings, usage, on_step, resources: PLAN)
    with pytest.raises(click.exceptions.Exit) as ended:
        load(overrides("./my/model", tmp_path), SERVING, explains=True)
    assert ended.value.exit_code == 0
    shown = capsys.readouterr().out
    assert "sequences at once (N)" in shown
    assert "time to first token" in shown
