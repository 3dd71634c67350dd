"""`moeflow bench peers`: hands over to `benchmarks/peers/run.py`, which only a source checkout has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import click

from moeflow.core.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "peers" / "run.py"

EPILOG = """\b
Examples:
  moeflow bench peers setup
      install llama.cpp and vLLM, each in its own environment (long, once)
  moeflow bench peers model      write the model in everyone's format (once)
  moeflow bench peers measure    ours and each peer in turns"""


@click.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def peers(arguments: tuple[str, ...]) -> int:
    """Measure llama.cpp, ik_llama.cpp, vLLM and transformers beside this engine. Needs the source checkout."""
    if not SCRIPT.is_file():
        raise ConfigError(f"{SCRIPT} is missing: other engines are measured from a checkout of the sources only")
    for package in ("transformers", "gguf"):  # which write the model for the peers
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is missing: pip install 'moeflow[bench]'")
    return subprocess.run([sys.executable, SCRIPT, *arguments], check=False).returncode
