import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from moeflow.cli.main import VERBS, main
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError, EngineError, RequestError

HEAVY = ("torch", "transformers", "fastapi", "numpy", "rich")
SHOW_MODULES = "import sys\nfrom moeflow.cli.main import main\ntry: main()\nfinally: print(*sys.modules)"


def run_shell(*args: str, code: str = "from moeflow.cli.main import main; main()") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


@pytest.fixture
def failing_verb(monkeypatch):
    """Make `moeflow doctor` raise whatever is put in."""

    def install(error: BaseException) -> None:
        @click.command()
        def doctor() -> None:
            raise error

        monkeypatch.setattr("moeflow.cli.doctor.doctor.doctor", doctor)

    return install


def test_help_imports_nothing_heavy():
    done = run_shell("--help", code=SHOW_MODULES)
    assert done.returncode == 0
    assert not set(HEAVY) & set(done.stdout.split())
    assert all(f"  {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", ["serve", "chat", "generate", "bench", "simulate", "doctor"])
def test_every_verbs_help_has_an_example_and_imports_no_torch(verb):
    done = run_shell(verb, "--help", code=SHOW_MODULES)
    assert done.returncode == 0
    assert f"\n    moeflow {verb}" in done.stdout
    assert not {"torch", "transformers", "fastapi"} & set(done.stdout.splitlines()[-1].split())


def all_commands(command=main, path=()):
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from all_commands(command.get_command(context, name), (*path, name))


def test_every_help_fits_80_columns():
    for path in all_commands():
        shown = CliRunner().invoke(main, [*path, "--help"], prog_name="moeflow", terminal_width=80).stdout
        assert shown
        assert [line for line in shown.splitlines() if len(line) > 80] == [], path


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "moeflow", "doctor", "--jsn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("Try 'moeflow doctor --help'.\n")


def test_no_verb_shows_the_help():
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert result.stdout.startswith("Usage: moeflow")


def test_a_mistyped_verb_is_answered_with_the_one_meant():
    result = CliRunner().invoke(main, ["serv"])
    assert result.exit_code == 2
    assert result.stderr == "error: no such command 'serv'; did you mean 'serve'?\nTry 'moeflow --help'.\n"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("serve", "--port", "abc"), "'abc' is not a valid integer."),
        (("generate", "--threads", "abc"), "'abc' is not a valid integer."),
        (("generate", "--temperature", "abc"), "'abc' is not a valid number."),
        (("simulate", "serve", "--replicas", "abc"), "'abc' is not a valid integer."),
    ],
)
def test_what_is_no_number_is_told_without_talk_of_ranges(args, complaint):
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_no_help_calls_a_number_a_range():
    for verb in VERBS:
        assert " RANGE" not in CliRunner().invoke(main, [verb, "--help"]).stdout


def test_a_wrong_option_names_the_verbs_help():
    result = CliRunner().invoke(main, ["doctor", "--jsn"], prog_name="moeflow")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: No such option")
    assert result.stderr.endswith("Try 'moeflow doctor --help'.\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad wish"), 2),
        (CapacityError("need more"), 2),
        (CheckpointError("is damaged", file="a.gguf", remedy="Download it again"), 2),
        (RequestError("too long"), 2),
        (EngineError("it died"), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(failing_verb, error, code):
    failing_verb(error)
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"error: {error}\n")


def test_debug_shows_where_an_error_came_from(failing_verb):
    failing_verb(ConfigError("bad wish"))
    result = CliRunner().invoke(main, ["--debug", "doctor"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: bad wish\n")


def test_a_bug_is_not_dressed_up_as_a_users_error(failing_verb):
    failing_verb(ZeroDivisionError())
    assert isinstance(CliRunner().invoke(main, ["doctor"]).exception, ZeroDivisionError)


def test_ctrl_c_exits_130_and_says_nothing(failing_verb):
    failing_verb(KeyboardInterrupt())
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 130
    assert result.output.strip() == ""


def test_version():
    assert CliRunner().invoke(main, ["--version"]).stdout.startswith("moeflow 0.")
