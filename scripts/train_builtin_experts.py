"""Trains the experts of the built-in model and writes them to their place in the package.

    python scripts/train_builtin_experts.py TEXTS --work FOLDER

TEXTS has one file NAME.txt for each of the eight experts. The last tenth of each measures the result.

The work folder keeps finished parts, so a stopped run resumes. A finished expert is `branch-NAME.safetensors` there.
It may come from elsewhere. For each layer L and each M of gate_proj, up_proj and down_proj it has two float32 tensors:
`layers.L.M.a` [1, in, rank] and `layers.L.M.b` [1, rank, out]. The transpose of their product is added to the matrix.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli.upcycle import summary, texts_table
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import BUILTIN_RECIPE, EXPERTS_FILE, builtin_source, fingerprint
from moeflow.train.experts.recipe import ExpertRecipe
from moeflow.train.experts.saved import TrainedExperts, load_experts, save_experts
from moeflow.train.experts.texts import learning_texts, measured_text, named_files
from moeflow.train.experts.training import inputs_of, train
from moeflow.train.phases import Phase
from moeflow.train.upcycling import upcycle
from moeflow.train.upcycling_quality import Quality, measure_quality
from moeflow.train.work_folder import work_folder

MAX_BYTES = 12_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write, measure."""
    options = _options(arguments)
    files = named_files([str(file) for file in sorted(options.texts.glob("*.txt"))])
    if len(files) != BUILTIN_RECIPE.num_experts:
        raise SystemExit(f"{options.texts} has {len(files)} texts; {BUILTIN_RECIPE.num_experts} are needed")
    recipe = ExpertRecipe(
        top_k=BUILTIN_RECIPE.top_k,
        rank=options.rank,
        steps=options.steps,
        joint_steps=options.joint_steps,
        learning_rate=options.learning_rate,
    )
    source = builtin_source()
    texts = learning_texts(Tokenizer.load(source).encode, files)
    with work_folder(options.work, may_have_parts=True) as work, closing(open_checkpoint(source)) as checkpoint:
        work.check_recipe({"data": list(files), **inputs_of(checkpoint, texts), **asdict(recipe)})
        trained = train(checkpoint, texts, recipe, work, _report)
    save_experts(options.out, fingerprint(source), trained, options.max_bytes)
    print(f"\nwrote {options.out}, {options.out.stat().st_size:,} bytes")
    packed = load_experts(options.out, fingerprint(source))
    assert packed is not None
    for name, experts in (("as trained", trained), ("as written", packed)):
        quality = _measured(source, experts, files)
        figures = summary(quality)
        print(f"\n{name}: {json.dumps(figures)}")
        Console(width=160).print(texts_table(figures["texts"]))


def _measured(source: Path, experts: TrainedExperts, files: dict[str, Path]) -> Quality:
    with tempfile.TemporaryDirectory() as folder:
        upcycle(source, Path(folder) / "model", BUILTIN_RECIPE, trained=experts, on_progress=_report)
        read_texts = partial(measured_text, files=files)
        return measure_quality(
            source, Path(folder) / "model", read_texts=read_texts, on_tokens=partial(_report, Phase.MEASURING)
        )


def _report(phase: Phase, done: int, total: int) -> None:
    print(f"\r{phase}: {done / max(total, 1):.1%} ", end="", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("texts", type=Path, help="folder of NAME.txt")
    parser.add_argument("--work", type=Path, required=True, help="folder of unfinished work")
    parser.add_argument("--out", type=Path, default=EXPERTS_FILE)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=72, help="of each expert alone")
    parser.add_argument("--joint-steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
