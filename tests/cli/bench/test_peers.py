from click.testing import CliRunner

from moeflow.cli.bench import peers
from moeflow.cli.main import main


def test_everything_after_the_verb_goes_to_the_script(tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.write_text("import pathlib, sys; pathlib.Path(__file__).with_name('got').write_text(' '.join(sys.argv[1:]))")
    monkeypatch.setattr(peers, "SCRIPT", script)
    result = CliRunner().invoke(main, ["bench", "peers", "measure", "--peer", "llama", "--rounds", "2"])
    assert result.exit_code == 0
    assert (tmp_path / "got").read_text() == "measure --peer llama --rounds 2"


def test_a_checkout_has_the_script(capfd):
    assert CliRunner().invoke(main, ["bench", "peers", "nonsense"]).exit_code == 2
    assert "No such command 'nonsense'" in capfd.readouterr().err


def test_the_scripts_exit_code_is_the_commands(tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(peers, "SCRIPT", script)
    assert CliRunner().invoke(main, ["bench", "peers", "measure"]).exit_code == 3


def test_without_a_package_it_says_what_to_install(tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.touch()
    monkeypatch.setattr(peers, "SCRIPT", script)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["bench", "peers", "setup"])
    assert result.exit_code == 2
    assert "pip install 'moeflow[bench]'" in result.stderr


def test_without_the_sources_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "SCRIPT", tmp_path / "run.py")
    result = CliRunner().invoke(main, ["bench", "peers", "setup"])
    assert result.exit_code == 2
    assert "from a checkout" in result.stderr
