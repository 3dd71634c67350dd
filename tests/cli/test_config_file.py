"""--config: the settings of a file, their precedence, and errors for invalid keys and values."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moeflow.cli import lazy
from moeflow.cli.help import Command
from moeflow.cli.main import main
from moeflow.cli.options import engine_options, sampling_options
from moeflow.core.errors import MoeflowError
from moeflow.settings.settings import Settings, options
from tests.documents import documented_configuration
from tests.test_documents import commands


@pytest.fixture
def served(monkeypatch):
    """Stand in for the server: the settings and configuration that it was started with."""
    calls = []
    monkeypatch.setitem(vars(lazy), "serve", lambda plan, config: calls.append((plan(), config)) or 0)
    monkeypatch.setitem(vars(lazy), "plan_for_start", lambda settings, usage, on_step, resources: settings)
    for name in ("MOEFLOW_API_KEY", "MOEFLOW_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def serve(served, tmp_path):
    """Run `moeflow serve` with a file: return its settings, or its output."""

    def run(text: str, *args: str):
        (tmp_path / "a.toml").write_text(text)
        result = CliRunner().invoke(main, ["serve", "--config", str(tmp_path / "a.toml"), *args])
        return served[-1] if result.exit_code == 0 else result.stderr.replace(str(tmp_path), "D")

    return run


def test_a_file_sets_options_of_every_kind(serve):
    settings, config = serve("""
        model = "./my/model"
        memory = "4GiB"
        kv-cache = 1073741824
        threads = 3
        quantize = "q4_k"
        prefix-caching = false
        stages = 2
        speculator = ["suffix", "self:int8"]
        trace = "t.json"
        cache-dir = "~/c"
        [serve]
        port = 9
        allowed-host = ["a", "b"]
        shutdown-deadline = 2.5
        max-body = "1MiB"
        log-prompts = true
    """)
    assert settings == Settings(
        model="./my/model",
        memory_bytes=4 * 1024**3,
        kv_cache_bytes=1024**3,
        num_threads=3,
        quantize="q4_k",
        prefix_caching=False,
        stages="2",
        speculators=("suffix", "self:int8"),
        trace_file=Path("t.json"),
        cache_dir=Path.home() / "c",
        is_served=True,
    )
    assert (config.port, config.allowed_hosts, config.shutdown_deadline_s) == (9, ("a", "b"), 2.5)
    assert (config.max_body_bytes, config.log_prompts) == (1024**2, True)


def test_the_command_line_goes_first_and_the_environment_next(serve, monkeypatch):
    text = 'model = "./m"\nthreads = 3\nmax-num-seqs = 5\ncache-dir = "/file"\n[serve]\napi-key = "file"\nport = 9'
    settings, config = serve(text, "./n", "--threads", "4", "--port", "0")
    assert (settings.model, settings.num_threads, settings.max_num_seqs, config.port) == ("./n", 4, 5, 0)
    assert (settings.cache_dir, config.api_key) == (Path("/file"), "file")
    monkeypatch.setenv("MOEFLOW_API_KEY", "environment")
    monkeypatch.setenv("MOEFLOW_CACHE", "/environment")
    settings, config = serve(text)
    assert (settings.cache_dir, config.api_key) == (Path("/environment"), "environment")
    settings, config = serve(text, "--api-key", "typed", "--cache-dir", "/typed")
    assert (settings.cache_dir, config.api_key) == (Path("/typed"), "typed")


def test_a_switch_of_the_file_is_turned_back(serve):
    assert serve('model = "./m"\nprefix-caching = false', "--prefix-caching")[0].prefix_caching


def test_a_verbs_table_goes_before_the_top_and_others_are_left_alone(serve):
    settings, _ = serve('model = "./m"\nthreads = 1\n[serve]\nthreads = 2\n[chat]\nthreads = 3\n[bench.serve]\nx = 4')
    assert settings.num_threads == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("thread = 1", "D/a.toml: thread is not an option of `moeflow serve`; did you mean 'threads'?"),
        ("[serve]\nmax_queue = 1", "serve.max_queue is not an option of `moeflow serve`; did you mean 'max-queue'?"),
        ("temperature = 1", "temperature is not an option of `moeflow serve`; what only another verb has"),
        ("config = 'x'", "config is not an option"),
        ("help = true", "help is not an option"),
        ("[serf]", "[serf] is not a verb of moeflow; did you mean 'serve'?"),
        ("serve = 1", "serve is not an option"),
        ("[[serve]]\nport = 1", "serve is not an option"),
        ("[serve.log]", "[serve.log] is not a verb of moeflow; tables are named after verbs"),
        ("threads = 0", "D/a.toml: threads: 0 is not in the range"),
        ("threads = 2.5", "threads: '2.5' is not a valid integer"),
        ("threads = true", "threads: must be one text or number, not True"),
        ("stages = [10, 14]", "stages: must be one text or number, not [10, 14]"),
        ("memory = 'much'", "memory: 'much' is not a size in bytes"),
        ("memory = 4", "memory: '4' has no unit"),
        ("dtype = 'int3'", "dtype: 'int3' is not one of"),
        ("prefix-caching = 'no'", "prefix-caching: must be true or false, not 'no'"),
        ("speculator = 'suffix'", "speculator: must be a list, such as ['suffix']"),
        ("speculator = [true]", "speculator: must be one text or number, not True"),
        ("model = 2020-01-01", "model: must be one text or number"),
        ("[serve]\nport = 'x'", "D/a.toml: serve.port: 'x' is not a valid integer"),
        ("trace = '/nowhere/t.json'", "trace: folder '/nowhere' does not exist"),
        ("threads = ", "config D/a.toml is not TOML: Invalid value (at"),
        ("threads = 1\nthreads = 2", "config D/a.toml is not TOML: Cannot overwrite a value"),
    ],
)
def test_what_makes_no_sense_is_named_with_file_and_key(serve, text, complaint):
    said = serve(text)
    assert said.startswith("error: ")
    assert complaint in said


def test_a_wrong_value_is_told_where_the_command_line_has_another(serve):
    assert "threads: 0 is not in the range" in serve("threads = 0", "--threads", "2")


def test_a_file_that_cannot_be_read(served, tmp_path):
    (tmp_path / "b.toml").write_bytes(b"\xff")
    for name, complaint in (("a.toml", "cannot be read: No such file"), ("b.toml", "is not TOML")):
        result = CliRunner().invoke(main, ["serve", "--config", str(tmp_path / name)])
        assert result.exit_code == 2
        assert f"config {tmp_path / name} {complaint}" in result.stderr


def test_options_of_one_verb_alone_are_read_alike(tmp_path):
    seen = {}

    @click.command(cls=Command)
    @engine_options
    @sampling_options
    def verb(**kwargs):
        seen.update(kwargs)

    file = tmp_path / "a.toml"
    file.write_text('temperature = 0.5\nstop = ["a"]\ntop-k = 3\n')
    CliRunner().invoke(verb, ["--config", str(file), "--top-k", "4"], catch_exceptions=False)
    sampling = seen["sampling"]
    assert (sampling.temperature, sampling.stop, sampling.top_k) == (0.5, ("a",), 4)


def test_every_verb_with_engine_options_takes_a_file():
    flags = {option.flag.partition("/")[0] for option in options().values() if not option.is_served_only}
    without_prefixes = {flag for flag in flags if not flag.startswith(("--prefix", "--prompt-cache", "--max-num-seqs"))}
    takes = {words for words, known in commands().items() if known >= without_prefixes}
    assert {("serve",), ("batch",), ("chat",), ("generate",), ("doctor",), ("bench", "serve")} <= takes
    others = {("plan",), ("pack",), ("join",), ("lend",)}
    assert takes | others == {words for words, known in commands().items() if "--config" in known}


@pytest.fixture
def verb(monkeypatch, tmp_path):
    """Run a verb with a file: return the settings passed on, or its output."""
    calls = []

    def noted(*args, **kwargs):
        calls.append((args, kwargs))
        raise MoeflowError("far enough")

    for name in ("plan_for", "pack", "keep_engines", "lend"):
        monkeypatch.setitem(vars(lazy), name, noted)
    monkeypatch.delenv("MOEFLOW_CACHE", raising=False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.chdir(tmp_path)

    def run(text: str, *args: str):
        (tmp_path / "a.toml").write_text(text)
        result = CliRunner().invoke(main, [*args, "--config", "a.toml"])
        return calls[-1] if result.stderr.endswith("error: far enough\n") else result.stderr

    return run


def test_a_plan_is_made_as_a_file_says(verb, monkeypatch):
    text = 'model = "config.json"\nthreads = 3\nmemory = "2GiB"\ncache-dir = "file"\n[plan]\nmachine = "t4"\nrate = 0.5'
    ((request, _), _) = verb(text, "plan", "--threads", "4")
    settings = request.settings
    assert (settings.num_threads, settings.memory_bytes) == (4, 2 * 1024**3)
    assert settings.model == str(Path("config.json").absolute())
    assert (request.machine, request.usage.workload.rate, settings.cache_dir) == ("t4", 0.5, Path("file"))
    monkeypatch.setenv("MOEFLOW_CACHE", "environment")
    assert verb(text, "plan")[0][0].settings.cache_dir == Path("environment")
    said = verb("[plan]\nrat = 1", "plan")
    assert "a.toml: plan.rat is not an option of `moeflow plan`; did you mean 'rate'?" in said


def test_weights_are_packed_as_a_file_says(verb, monkeypatch):
    text = 'model = "config.json"\ndtype = "bfloat16"\nthreads = 3\ncache-dir = "file"\n[pack]\nout = "it.slabs"'
    ((model, out), kwargs) = verb(text, "pack", "--threads", "4")
    assert (model, out) == ("config.json", Path("it.slabs"))
    assert (kwargs["dtype"], kwargs["num_threads"], kwargs["cache_dir"]) == ("bfloat16", 4, Path("file"))
    monkeypatch.setenv("MOEFLOW_CACHE", "environment")
    assert verb(text, "pack")[1]["cache_dir"] == Path("environment")
    assert "pack.out: must be one text or number, not True" in verb("[pack]\nout = true", "pack")


def test_ranks_join_and_memory_is_lent_as_a_file_says(verb):
    text = 'threads = 3\ncluster-token-file = "token"\ncache-dir = "file"\n[join]\nmodel = "config.json"\n'
    text += '[lend]\nlisten = "b.lan:9300"\nmemory = "16GiB"'
    ((settings, _), _) = verb(text, "join", "a.lan:9200")
    assert (settings.host, settings.num_threads, settings.cache_dir) == ("a.lan", 3, Path("file"))
    assert settings.model == str(Path("config.json").absolute())
    assert verb(text, "join", "a.lan:9200", "--threads", "2")[0][0].num_threads == 2
    ((settings, _), _) = verb(text, "lend")
    assert (settings.host, settings.port, settings.memory_bytes) == ("b.lan", 9300, 16 * 1024**3)
    assert "memory is not an option of `moeflow join`" in verb('memory = "4GiB"', "join", "a.lan:9200")


def test_the_documented_file_is_accepted(serve):
    settings, config = serve(documented_configuration(), "./m")
    assert (settings.memory_bytes, config.log_format) == (16 * 1024**3, "json")
