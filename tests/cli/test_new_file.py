import pytest
from click.testing import CliRunner

from moeflow.cli.main import main


@pytest.mark.parametrize("option", ["--trace", "--graph", "--record-routing"])
def test_a_place_that_cannot_be_written_to_is_said_before_anything_loads(tmp_path, option):
    done = CliRunner().invoke(main, ["generate", "Hi", option, str(tmp_path / "nowhere" / "file")])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output
    assert "does not exist; make it" in " ".join(done.output.split())
