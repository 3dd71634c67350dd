"""`moeflow bench engine`: how fast a model runs here, beside how fast this machine could run it."""

from __future__ import annotations

from typing import Any

import click

from moeflow.bench.records import make_record
from moeflow.bench.tables import engine_table
from moeflow.cli import lazy
from moeflow.cli.bench.output import keep, repeated_command, result_options, show
from moeflow.cli.help import Command
from moeflow.cli.local_model import prepare
from moeflow.cli.options import engine_options_but
from moeflow.cli.progress import bar, progress_bar

EPILOG = """\b
Examples:
  moeflow bench engine                                    the built-in model
  moeflow bench engine ~/models/olmoe --dtype bfloat16 \\
      --out docs/studies/results/engine.jsonl
  moeflow bench engine ~/models/olmoe --batch 1 --batch 8 --prefill 512 \\
      --repeats 9

Decode is timed in passes of the whole batch once every prompt is computed; prefill is one prompt up to its
first token. Each row shows what share of the memory bandwidth it used, counting every weight that a pass must
read once, and what share of the float32 peak. Both ceilings are measured here, in between. Ctrl-C ends the
measurement and keeps what there is."""


@click.command(cls=Command, epilog=EPILOG)
@engine_options_but("prefix_caching", "prompt_cache", "prompt_cache_bytes")
@click.option("--batch", "batch_sizes", type=click.IntRange(1, 4096), multiple=True, help="Decode with so many.")
@click.option("--prefill", "prefill_lens", type=click.IntRange(1), multiple=True, help="Prefill so many tokens.")
@click.option("--prompt-len", type=click.IntRange(1), default=32, show_default=True, help="Prompts of decoding rows.")
@click.option("--new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Decode passes to time.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Measurements of each row.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same prompts.")
@result_options
def engine(
    overrides: dict[str, Any],
    batch_sizes: tuple[int, ...],
    prefill_lens: tuple[int, ...],
    prompt_len: int,
    new_tokens: int,
    repeats: int,
    seed: int,
    as_json: bool,
    out: Any,
) -> int:
    """Measure decode and prefill, load time and memory.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model is measured. --batch and
    --prefill may be given several times; without either, batches of 1 to 64 and prompts of 128 to 2048 tokens.
    """
    if not batch_sizes and not prefill_lens:
        batch_sizes, prefill_lens = lazy.BATCH_SIZES, lazy.PREFILL_LENS
    most = overrides.get("max_num_seqs") or (max(batch_sizes, default=1) if overrides["plan_file"] is None else None)
    settings = prepare({**overrides, "max_num_seqs": most}, prefix_caching=False)
    cases = lazy.make_cases(batch_sizes, prefill_lens, prompt_len, new_tokens)
    run = lazy.EngineRun(settings, cases, repeats=repeats, seed=seed)
    with progress_bar("Loading") as on_progress:
        run.load(on_progress)
    interrupted = False
    try:
        with bar(run.num_steps) as shown:
            run.run(shown.say, shown.advance)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        run.close()
    command = repeated_command()
    record = make_record("engine", command, seed=seed, threads=run.config.num_threads, **run.result())
    keep(record, out, as_json=as_json)
    if not as_json:
        show(engine_table(record))
    return 130 if interrupted else 0
