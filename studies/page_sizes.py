"""What the pages that packed weights lie on cost a token: the same file in the system's cache in several ways.

    python -m studies.page_sizes MODEL PACKED_FILE [--threads 1] [--repeats 3]

Each turn is a separate process that decodes one request from a copy of the file. By its settings it leaves its pages
unchanged, or enlarges them as usual. It counts processor time, which other programs disturb little.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final
from unittest.mock import patch

import click

from moeflow import LLM, SamplingParams
from moeflow.checkpoint.packed.file_io import drop_cached_file
from moeflow.checkpoint.packed.large_pages import LargePages
from moeflow.core.durable import sync
from studies.harness.command import run_study

_PAGE_BYTES: Final = 4096
_NUM_TOKENS: Final = 48
_NUM_ANSWERS: Final = 7  # of which the best counts


def copied(file: Path, original: Path) -> None:
    """Copy it."""
    shutil.copyfile(original, file)


def in_order(file: Path, original: Path) -> None:
    """Read it page by page."""
    _read_pages(file, original, range(0, original.stat().st_size, _PAGE_BYTES))


def scattered(file: Path, original: Path) -> None:
    """Read its pages in any order."""
    starts = list(range(0, original.stat().st_size, _PAGE_BYTES))
    random.Random(1).shuffle(starts)
    _read_pages(file, original, starts)


def from_disk(file: Path, original: Path) -> None:
    """Leave it on disk, from which it comes when it is mapped."""
    _read_pages(file, original, [])


ARMS: Final = {"large pages": from_disk, "copied": copied, "page by page": in_order, "scattered": scattered}


def _read_pages(file: Path, original: Path, starts: list[int] | range) -> None:
    copied(file, original)
    sync(file)
    drop_cached_file(file)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # without reading ahead
        for start in starts:
            os.pread(descriptor, _PAGE_BYTES, start)
    finally:
        os.close(descriptor)


def decode(model: str, file: str, num_threads: int, *, enlarges: bool) -> float:
    """Return processor seconds a token, in this process."""
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    seconds = []
    with patch.object(LargePages, "begin", LargePages.begin if enlarges else lambda _: None):
        llm = LLM(model, packed_weights_file=file, num_threads=num_threads, generation_config="none")
    with closing(llm):
        for _ in range(_NUM_ANSWERS):
            began_s = time.process_time()
            llm.generate(["Hello"], sampling, progress=False)
            seconds.append((time.process_time() - began_s) / _NUM_TOKENS)
    return min(seconds)


@click.command()
@click.argument("model")
@click.argument("packed_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", default=1)
@click.option("--repeats", default=3)
@click.option("--turn", type=click.Choice(["kept", "enlarged"]), hidden=True)
def main(model: str, packed_file: Path, threads: int, repeats: int, turn: str | None) -> None:
    """Time each way, or one turn."""
    if turn is not None:
        print(decode(model, str(packed_file), threads, enlarges=turn == "enlarged"))
        return
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=packed_file.parent) as folder:
        file = Path(folder) / packed_file.name
        for _ in range(repeats):
            for name, prepare in ARMS.items():
                prepare(file, packed_file)
                for how in ("kept", "enlarged"):
                    command = [
                        sys.executable,
                        "-m",
                        "studies.page_sizes",
                        model,
                        str(file),
                        "--threads",
                        str(threads),
                        "--turn",
                        how,
                    ]
                    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    found.setdefault((name, how), []).append(float(result.stdout) * 1e3)
    for (name, how), milliseconds in found.items():
        print(f"{name:12}  {how:8}  {statistics.median(milliseconds):6.2f} ms a token")


if __name__ == "__main__":
    run_study(main)
