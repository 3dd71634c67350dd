from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moeflow.cli.help import Command
from moeflow.cli.options import default_cache_dir, engine_options, sampling_options
from moeflow.core.errors import RequestError
from moeflow.core.sampling_params import SamplingParams
from moeflow.settings.settings import Settings, options


@pytest.fixture
def seen():
    return {}


@pytest.fixture
def verb(seen):
    @click.command(cls=Command)
    @engine_options
    @sampling_options
    @click.option("--own")
    def verb(**kwargs):
        seen.update(kwargs)

    return verb


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MOEFLOW_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/moeflow")),
        ({}, Path.home() / ".cache/moeflow"),
        ({"MOEFLOW_CACHE": "~/models"}, Path.home() / "models"),
    ],
)
def test_the_cache_folder_comes_from_the_environment(monkeypatch, environment, expected):
    for name in ("MOEFLOW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == expected


def test_wishes_and_sampling_are_gathered(verb, seen):
    args = [
        "my/model",
        "--kv-cache",
        "2GiB",
        "--memory",
        "3GiB",
        "--threads",
        "2",
        "--cache-dir",
        "/tmp/x",
        "--own",
        "1",
    ]
    args += ["--temperature", "0.5", "--stop", "a", "--stop", "b", "--seed", "7"]
    result = CliRunner().invoke(verb, args, catch_exceptions=False)
    assert result.exit_code == 0
    overrides = seen["overrides"]
    assert overrides.pop("plan_file") is None
    assert Settings(**overrides) == Settings(
        model="my/model",
        num_threads=2,
        kv_cache_bytes=2 * 1024**3,
        memory_bytes=3 * 1024**3,
        cache_dir=Path("/tmp/x"),
    )
    assert seen["sampling"] == SamplingParams(max_tokens=None, temperature=0.5, stop=("a", "b"), seed=7)
    assert seen["own"] == "1"


def test_only_given_settings_are_overrides_even_at_their_defaults(verb, seen, tmp_path):
    own = {"model", "plan_file", "cache_dir"}
    CliRunner().invoke(verb, [], catch_exceptions=False)
    assert set(seen["overrides"]) == own
    CliRunner().invoke(verb, ["--prefix-caching", "--device", "auto"], catch_exceptions=False)
    assert seen["overrides"].items() >= {"prefix_caching": True, "device": "auto"}.items()
    file = tmp_path / "config.toml"
    file.write_text('kv-dtype = "auto"\n')
    CliRunner().invoke(verb, ["--config", str(file)], catch_exceptions=False)
    assert {name: seen["overrides"][name] for name in set(seen["overrides"]) - own} == {"kv_dtype": "auto"}


def test_help_shows_what_people_use_and_help_all_shows_everything(verb):
    short, whole = (
        CliRunner().invoke(verb, [flag], catch_exceptions=False).output for flag in ("--help", "--help-all")
    )
    for option in options().values():
        flag = option.flag.partition("/")[0]
        assert (f"  {flag} " in short) == option.is_common
        assert (f"  {flag} " in whole) != option.is_served_only
        assert f"\n{option.group}:\n" in whole
    assert "--own" in short
    assert short.count("\n  -") < 20


def test_the_environment_caps_the_instruction_set(verb, seen, monkeypatch):
    monkeypatch.setenv("MOEFLOW_CPU_ISA", "avx2")
    CliRunner().invoke(verb, ["m", "--quantize", "int4", "--own", "1"], catch_exceptions=False)
    assert (seen["overrides"]["cpu_isa"], seen["overrides"]["quantize"]) == ("avx2", "int4")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--kv-cache", "much"], "is not a size in bytes"),
        (["--threads", "0"], "0 is not in the range"),
        (["--dtype", "int3"], "int3"),
        (["--quantize", "int3"], "int3"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(verb, args, complaint):
    result = CliRunner().invoke(verb, args)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_sampling_out_of_range_is_the_cores_own_error(verb):
    assert isinstance(CliRunner().invoke(verb, ["--top-p", "2"]).exception, RequestError)


@pytest.mark.parametrize(
    ("size", "meant"), [("4", "4GiB"), ("512", "512MiB"), (" 16 ", "16GiB"), ("4096", "4096MiB"), ("63", "63GiB")]
)
@pytest.mark.parametrize("option", ["--memory", "--kv-cache", "--gpu-memory"])
def test_memory_without_a_unit_is_asked_about(verb, option, size, meant):
    result = CliRunner().invoke(verb, [option, size])
    assert result.exit_code == 2
    assert f"did you mean {meant}?" in result.stderr


@pytest.mark.parametrize(("size", "num_bytes"), [("2147483648", 2**31), ("512k", 2**19), ("4096B", 4096)])
def test_memory_in_bytes_is_taken_where_it_can_be_meant(verb, seen, size, num_bytes):
    assert CliRunner().invoke(verb, ["--memory", size]).exit_code == 0
    assert seen["overrides"]["memory_bytes"] == num_bytes


@pytest.mark.parametrize(("temperature", "code"), [("0", 0), ("2", 0), ("2.1", 2), ("100", 2), ("-1", 2)])
def test_the_temperature_ends_at_2_as_in_the_api(verb, temperature, code):
    assert CliRunner().invoke(verb, ["--temperature", temperature]).exit_code == code
