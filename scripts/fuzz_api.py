"""Fuzzes the HTTP API with schemathesis against the API's own OpenAPI document. Exits with 0 if nothing was found.

    scripts/fuzz-api [--max-examples N] [--max-time S] [--seed N]

Starts `moeflow serve` with a tiny random model on a free loopback port and a temporary folder, and runs all checks of
schemathesis in all phases (examples, coverage, fuzzing, stateful), with valid and with invalid data, and no filter;
`fuzz_hooks.py` sees to what the document cannot say.
Whatever happens, the server is stopped and the folder removed; what it logged beside requests is shown, and an error
of its own counts as a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.packed import pack_beside  # noqa: E402
from tests.tiny_mixtral import write_tiny_mixtral  # noqa: E402

STOP_S = 40
REQUEST_S = 300  # 128 completions that fill the context, on a busy machine; no claim about speed
CONTEXT = 3072  # tokens, which are bytes here: more than a generated prompt has, few enough to be filled quickly
MAX_QUEUE = 1000  # sequences: that prompts times n must not exceed it is more than the document can say
MAIN = "import sys; from moeflow.cli.main import main; sys.exit(main())"
LAST_S = 1800  # a run that takes longer is ended


@contextlib.contextmanager
def running_server(folder: Path, log: Path) -> Iterator[str]:
    """Serve a tiny model, with everything it writes in the folder; yield the address."""
    write_tiny_mixtral(folder / "model", max_position_embeddings=CONTEXT)
    pack_beside(folder / "model", folder / "cache")
    command = [
        sys.executable,
        "-c",
        MAIN,
        "serve",
        str(folder / "model"),
        "--port",
        "0",
        "--threads",
        "1",
        "--images",
        "placeholder",
    ]
    command += ["--speculator", "suffix"]  # so that `token_trees` is answered, too
    command += ["--cache-dir", str(folder / "cache"), "--max-queue", str(MAX_QUEUE), "--log-level", "error"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline()  # the one that says where; empty if it has ended
            if "http://" not in line:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            yield line.split()[-1]
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def fuzz(url: str, folder: Path, arguments: argparse.Namespace) -> int:
    """Run schemathesis; return its exit code."""
    command = [str(Path(sys.executable).with_name("st")), "run", f"{url}/openapi.json", "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing,stateful", "--mode", "all", "--checks", "all"]
    command += ["--max-examples", str(arguments.max_examples), "--request-timeout", str(REQUEST_S)]
    command += ["--max-response-time", str(REQUEST_S)]
    command += ["--continue-on-failure", "--warnings", "off"]
    if arguments.seed is not None:
        command += ["--seed", str(arguments.seed)]
    if arguments.max_time is not None:
        command += ["--max-time", str(arguments.max_time)]
    hooks = {"SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(ROOT / "scripts")}
    return subprocess.run(command, cwd=folder, check=False, timeout=LAST_S, env={**os.environ, **hooks}).returncode


def main() -> int:
    """Start, fuzz, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=100, help="of each operation in each phase; default 100")
    parser.add_argument("--max-time", type=int, help="seconds for all phases; default: as long as it takes")
    parser.add_argument("--seed", type=int, help="to repeat a run; default: a new one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moeflow-fuzz-") as name:
        folder, log = Path(name), Path(name) / "server.log"
        with running_server(folder, log) as url:
            code = fuzz(url, folder, arguments)
        errors = log.read_text()
    if " ERROR " in errors:
        print(f"the server logged errors:\n{errors}", file=sys.stderr)
        return code or 1
    return code


if __name__ == "__main__":
    sys.exit(main())
