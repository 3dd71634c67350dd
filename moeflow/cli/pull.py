"""`moeflow pull`: fetches a model from Hugging Face, or another hub of its kind."""

from __future__ import annotations

import json
import time

import click

from moeflow.cli.kept_bytes import bytes_in
from moeflow.cli.pulling import fetch, model_name
from moeflow.core.units import format_bytes, format_seconds

EPILOG = """\b
Examples:
  moeflow plan Qwen/Qwen3-30B-A3B
      how fast would it run here? Reads its headers only
  moeflow pull Qwen/Qwen3-30B-A3B
      the model as its makers have it, in safetensors
  moeflow pull Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M
      one GGUF file, by its tag or its name
  moeflow pull mistralai/Mixtral-8x7B-v0.1@refs/pr/5
      a branch, tag or commit
  moeflow generate Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M -p "Once"
      a name works wherever a path does

Only weights in safetensors or GGUF are fetched, with the small files that describe a model; never pickles or code.
Every file is verified by checksum. The same command resumes an interrupted download.

Models lie in the cache of the hub library, so what other tools have fetched is here, too, and the other way round:
HF_HUB_CACHE, or hub/ in HF_HOME, else ~/.cache/huggingface/hub. For private and gated models set HF_TOKEN, or run
`hf auth login`; HF_ENDPOINT names a mirror. A GGUF name without tag means Q4_K_M."""


@click.command(epilog=EPILOG)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pull(name: str, as_json: bool) -> None:
    """Download a model from Hugging Face; run it again to resume.

    NAME is OWNER/NAME as in the address of its page, with @REVISION for another than the main branch, and with :TAG for
    a GGUF file of that quantization.
    """
    wanted = model_name(name)
    began_s = time.monotonic()
    path = fetch(wanted)
    num_bytes = bytes_in(path)
    seconds = time.monotonic() - began_s
    if as_json:
        result = {"name": str(wanted), "path": str(path), "size_bytes": num_bytes, "seconds": round(seconds, 1)}
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(f"{wanted} is here: {format_bytes(num_bytes)} after {format_seconds(seconds)}, in {path}")
