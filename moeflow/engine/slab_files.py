"""The slab file that belongs to a model: where it is kept, and that it is there when experts are to come from it."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.engine.machine import measure_machine
from moeflow.engine.weight_choice import own_precision, wished
from moeflow.kernels import cpu
from moeflow.kernels.weight_format import WeightFormat
from moeflow.memory.slab_file import SlabIndex, SlabSpec, read_slab_index
from moeflow.memory.slab_writer import OnBytes
from moeflow.models.packing import pack_experts, slab_spec
from moeflow.models.registry import read_model_config


def slab_file_place(cache_dir: Path | None, checkpoint: Checkpoint, spec: SlabSpec) -> Path:
    """Return where a model's slab file is kept if the user names no place: one for each checkpoint and format."""
    folder = (cache_dir or Path.home() / ".cache" / "moeflow") / "experts"
    digest = hashlib.sha256(msgspec.json.encode(spec)).hexdigest()[:12]
    return folder / f"{checkpoint.path.resolve().stem}-{spec.weight_format}-{digest}.slabs"


def ensure_slab_file(
    checkpoint: Checkpoint,
    file: Path,
    weight_format: WeightFormat,
    *,
    num_threads: int,
    on_bytes: OnBytes | None = None,
) -> SlabIndex:
    """Return what the model's slab file holds, after writing it if it is not there.

    Raises: ConfigError if the file belongs to another model or format; as `pack_experts` and `read_slab_index` do.
    """
    spec = slab_spec(checkpoint, read_model_config(checkpoint), weight_format)
    if not file.exists():
        pack_experts(checkpoint, file, weight_format, num_threads=num_threads, on_bytes=on_bytes)
    index = read_slab_index(file)
    if index.spec != spec:
        raise ConfigError(
            f"{file} holds the experts of another model, or of this one in {index.spec.weight_format} instead of "
            f"{weight_format}. Name another file, or delete it; it is made anew"
        )
    return index


def pack(
    model: str,
    out: Path | None,
    *,
    cache_dir: Path | None,
    dtype: str = "auto",
    quantize: str | None = None,
    num_threads: int | None = None,
    on_bytes: OnBytes | None = None,
) -> SlabIndex:
    """Make a model's slab file, at `out` or where the engine looks for it, if it is not there.

    Raises: ConfigError if the model has no experts; CheckpointError, CapacityError.
    """
    if not cpu.is_available():
        raise ConfigError(f"experts are packed for the CPU kernels, which are not there: {cpu.why_not()}")
    with closing(open_checkpoint(model)) as checkpoint:
        shape = read_model_config(checkpoint)
        if not shape.num_experts:
            raise ConfigError(f"{checkpoint.path} is a dense model: there are no experts to pack")
        choice = wished(dtype, quantize, can_pack=True) or own_precision(checkpoint, shape, lambda _: True)
        spec = slab_spec(checkpoint, shape, choice.matrices)
        file = out or slab_file_place(cache_dir, checkpoint, spec)
        threads = num_threads or measure_machine().num_cores
        return ensure_slab_file(checkpoint, file, choice.matrices, num_threads=threads, on_bytes=on_bytes)
