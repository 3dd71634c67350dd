"""Files in the formats that people have, made by llama.cpp's own quantizer: it mixes types within one file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from moeflow.core.errors import ConfigError
from studies.harness.needs import ROOT
from studies.peers.environments import LLAMA

# By the name in the file's name: what llama.h calls it. MXFP4 is for experts; the rest of such a file is Q8_0.
FILE_TYPES = {
    "q4_k_m": "Q4_K_M",
    "q5_k_m": "Q5_K_M",
    "q6_k": "Q6_K",
    "iq4_xs": "IQ4_XS",
    "mxfp4": "MXFP4_MOE",
}


def quantize(source: Path, target: Path, name: str, folder: Path) -> None:
    """Write a file of one of `FILE_TYPES` from one in bfloat16; needs llama.cpp's environment in `folder`.

    Raises: ConfigError if llama.cpp is not there or refuses.
    """
    python = LLAMA.python(folder)
    if not python.exists():
        raise ConfigError(f"{python} is not there; install llama.cpp with `setup --peer llama`")
    unfinished = target.with_suffix(".unfinished")
    wish = {"source": str(source), "target": str(unfinished), "type": FILE_TYPES[name], "threads": os.cpu_count()}
    command = ["nice", "-n", "10", str(python), "-m", "studies.peers.workers.llama_quantize", json.dumps(wish)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"llama.cpp did not make {target} of {source}: {done.stderr[-500:]}")
    unfinished.rename(target)
