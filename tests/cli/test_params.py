import pytest
from click.testing import CliRunner

from moeflow.cli.main import main


@pytest.mark.parametrize("option", ["--trace", "--graph", "--record-routing"])
def test_a_place_that_cannot_be_written_to_is_said_before_anything_loads(tmp_path, option):
    done = CliRunner().invoke(main, ["generate", "Hi", option, str(tmp_path / "nowhere" / "file")])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output
    assert "does not exist; make it" in " ".join(done.output.split())


@pytest.mark.parametrize(
    "command",
    [
        ["batch", __file__, "-o"],
        ["batch", __file__, "-o", "out.jsonl", "--errors"],
        ["simulate", "pipeline", "--trace"],
        ["simulate", "pipeline", "--graph"],
    ],
)
def test_results_and_traces_too_need_a_folder(tmp_path, command):
    done = CliRunner().invoke(main, [*command, str(tmp_path / "nowhere" / "file")])
    assert done.exit_code == 2
    assert "does not exist; make it" in " ".join(done.output.split())


def test_a_picture_is_named_as_one():
    done = CliRunner().invoke(main, ["plan", "mixtral-8x7b", "--roofline", "roofs.txt"])
    assert done.exit_code == 2
    assert "'roofs.txt' does not end in .png" in " ".join(done.output.split())
