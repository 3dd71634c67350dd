"""`moeflow serve`: a model behind an OpenAI-compatible HTTP API, and a page to talk to it.

Knows only what the user may set; how to serve is the server's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.cli.api_key import api_key_option
from moeflow.cli.help import Command, GroupedOption
from moeflow.cli.local_model import fetch_if_named, planned
from moeflow.cli.options import byte_count, explain_option, pull_option, served_engine_options
from moeflow.cli.params import complete_model
from moeflow.cli.served_models import SeveralModels, chosen_models, named_paths, split_name
from moeflow.planner.usage import SERVING

EPILOG = """\b
Examples:
  moeflow serve
      the built-in model, made on first use
  moeflow serve ~/models/olmoe --port 9000       a Hugging Face folder
  moeflow serve ~/models/mixtral.Q4_0.gguf       a GGUF file
  moeflow serve Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M --pull
      a model by its name, downloaded if needed
  moeflow serve --model small=~/models/olmoe --model ~/mixtral.Q4_0.gguf
      several, loaded when requested; idle ones are unloaded
  MOEFLOW_API_KEY=secret moeflow serve --host 0.0.0.0
\b
Then open the printed address in a browser, or ask from a shell:
  curl http://127.0.0.1:8000/v1/chat/completions \\
    -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'

Only this machine can connect unless --host says otherwise; then set an API key. Ctrl-C or SIGTERM stops
taking requests, lets running ones finish within --shutdown-deadline, and exits with 0."""


@click.command(cls=Command, epilog=EPILOG)
@served_engine_options
@pull_option
@explain_option
@click.option(
    "--model",
    "models",
    metavar="[NAME=]MODEL",
    multiple=True,
    shell_complete=complete_model,
    help="One of several models, each loaded when a request names it; may be given several times.",
)
@click.option(
    "--model-name", cls=GroupedOption, group="API", help="The model's name in the API.  [default: its folder or file]"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every network.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0: any free one.")
@click.option(
    "--grpc-port",
    cls=GroupedOption,
    group="API",
    type=int,
    help="Port for gRPC beside HTTP, on the same address; 0: any free one.  [default: no gRPC]",
)
@api_key_option("Key that clients must send.")
@click.option(
    "--api-keys-file",
    cls=GroupedOption,
    group="API",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file of several keys, each with a name and limits; SIGHUP reads it again.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    cls=GroupedOption,
    group="API",
    multiple=True,
    help="A name under which browsers may call this server; may be given several times.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    cls=GroupedOption,
    group="API",
    metavar="ORIGIN",
    multiple=True,
    help="Origin of web pages that may use the API, or *; may be given several times.",
)
@click.option(
    "--tls-cert",
    cls=GroupedOption,
    group="TLS and proxies",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Certificate with its chain, for HTTPS; SIGHUP reads it again.",
)
@click.option(
    "--tls-key",
    cls=GroupedOption,
    group="TLS and proxies",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Private key of the certificate.",
)
@click.option(
    "--forwarded-allow-ips",
    cls=GroupedOption,
    group="TLS and proxies",
    metavar="IPS",
    help="Proxies to trust X-Forwarded-For and -Proto from: addresses, networks, separated by commas; or *.",
)
@click.option(
    "--root-path",
    cls=GroupedOption,
    group="TLS and proxies",
    metavar="PATH",
    default="",
    help="Prefix that a proxy has removed from paths, such as /llm.",
)
@click.option(
    "--max-queue",
    cls=GroupedOption,
    group="Limits",
    type=int,
    default=64,
    show_default=True,
    help="Maximum waiting requests; more get 429.",
)
@click.option(
    "--fronts",
    "num_fronts",
    cls=GroupedOption,
    group="Engine process",
    type=int,
    default=1,
    show_default=True,
    help="HTTP processes for the same engines. One streams 14,000 tokens/s or more.",
)
@click.option(
    "--max-body",
    "max_body_bytes",
    cls=GroupedOption,
    group="Limits",
    metavar="SIZE",
    callback=byte_count,
    default="4MiB",
    show_default=True,
    help="Largest request body.",
)
@click.option(
    "--unknown-fields",
    cls=GroupedOption,
    group="Limits",
    type=click.Choice(["refuse", "ignore"]),
    default="refuse",
    show_default=True,
    help="Fields of requests that the server does not know: refuse with 400, or ignore and name them in a header.",
)
@click.option(
    "--images",
    cls=GroupedOption,
    group="Limits",
    type=click.Choice(["refuse", "results", "placeholder"]),
    default="results",
    show_default=True,
    help="Images in requests: refuse all, put a text in place of those in tool results, or in place of all.",
)
@click.option(
    "--data-dir",
    cls=GroupedOption,
    group="Files and batch jobs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where uploaded files and batch jobs are kept, for this server alone.  [default: jobs/ in the cache folder]",
)
@click.option(
    "--max-file",
    "max_file_bytes",
    cls=GroupedOption,
    group="Files and batch jobs",
    metavar="SIZE",
    callback=byte_count,
    default="200MiB",
    show_default=True,
    help="Largest file to upload.",
)
@click.option(
    "--file-quota",
    "file_quota_bytes",
    cls=GroupedOption,
    group="Files and batch jobs",
    metavar="SIZE",
    callback=byte_count,
    default="10GiB",
    show_default=True,
    help="Maximum total size of files, including results of jobs. Larger uploads are refused.",
)
@click.option(
    "--shutdown-deadline",
    "shutdown_deadline_s",
    cls=GroupedOption,
    group="Engine process",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds that running requests get to finish.",
)
@click.option(
    "--log-level",
    cls=GroupedOption,
    group="Log",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Minimum level of log lines on stderr; info: one for each request, debug: probes and the page's files, too.",
)
@click.option(
    "--log-format",
    cls=GroupedOption,
    group="Log",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of the log.",
)
@click.option(
    "--log-prompts",
    cls=GroupedOption,
    group="Log",
    is_flag=True,
    help="Log prompts, too.",
)
@click.option(
    "--otlp-endpoint",
    cls=GroupedOption,
    group="Log",
    metavar="URL",
    help="Where to send a trace of each request, by OTLP over HTTP.  [default: (OTEL_EXPORTER_OTLP_...)]",
)
@click.option(
    "--max-engine-restarts",
    cls=GroupedOption,
    group="Engine process",
    type=int,
    default=100,
    show_default=True,
    help="Maximum restarts of a dead engine within an hour; 0: the server exits with it.",
)
@click.option(
    "--engine-timeout",
    "engine_timeout_s",
    cls=GroupedOption,
    group="Engine process",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds without an answer after which the engine is restarted; 0: never.",
)
def serve(
    overrides: dict[str, Any],
    pulls: bool,
    explains: bool,
    models: tuple[str, ...],
    model_name: str | None,
    data_dir: Path | None,
    **server_overrides: Any,
) -> int:
    """Serve a model: OpenAI- and Anthropic-compatible APIs and a chat page.

    MODEL is a Hugging Face folder, a .gguf file, or the name of a pulled model; without it, the built-in model is
    served. Several models (--model) share --memory, by default the memory free at the start. Requests select one by
    name.
    """
    if not explains:
        lazy.start_logs(server_overrides["log_level"], server_overrides["log_format"])
    chosen = chosen_models(overrides["model"], models)
    config = lazy.ServerConfig(**server_overrides, data_dir=data_dir or overrides["cache_dir"] / "jobs")
    if len(chosen) > 1:
        if model_name:
            raise click.UsageError("--model-name is for one model; several are named by --model NAME=MODEL")
        several = SeveralModels.of(overrides, named_paths(chosen, pulls=pulls))
        return several.explain() if explains else several.serve(config)
    name, model = split_name(chosen[0]) if chosen else ("", None)
    if pulls:
        fetch_if_named(model)
    overrides = {**overrides, "model": model, "model_name": model_name or name or None}
    if explains:
        planned(overrides, SERVING, explains=True, is_served=True)
    return lazy.serve(lambda: planned(overrides, SERVING, is_served=True), config)
