"""The packed weights of a model: their place, and their existence where experts come from them. A model that fits into
memory starts from them if they exist.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import cast

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.gguf.file_names import whole_name
from moeflow.checkpoint.identity import pulled_name
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import SlabIndex, SlabSpec, is_packed_weights_file, read_slab_index
from moeflow.checkpoint.packed.mapped import map_weights
from moeflow.checkpoint.packed.reader import OnBytes, damaged_parts, ignore, verify_packed_weights_file
from moeflow.checkpoint.packed.weight_memory import WeightMemory
from moeflow.core.cache_dir import cache_folder
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CheckpointError, ConfigError, StorageError
from moeflow.core.sha256 import sha256
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.expert_predictor import saved
from moeflow.models.importance import known_importance
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.packing import layer_table_range, names_in_part, pack_model, slab_spec
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.weight_choice import explicit_choice, own_precision
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.known_importance import known_importance_file

with on_demand(__name__):
    from moeflow.checkpoint.packed import expert_reader


def packed_weights_file_place(cache_dir: Path | None, checkpoint: Checkpoint, spec: SlabSpec) -> Path:
    """Return where a model's packed weights are kept if the user names no place: a file each checkpoint and format."""
    folder = cache_folder(cache_dir) / "experts"
    digest = sha256(msgspec.json.encode(spec)).hexdigest()[:12]
    return folder / f"{_file_name(checkpoint.path)}-{spec.weight_format}-{digest}.slabs"


def _file_name(model: Path) -> str:
    name = pulled_name(model)
    return Path(whole_name(model.resolve().name)).stem if name is None else name.replace("/", "--").replace(":", "-")


def find_packed_weights_file(
    checkpoint: Checkpoint, spec: SlabSpec, packed_weights_file: Path | None, cache_dir: Path | None
) -> Path | None:
    """Return the packed weights that a model's weights can be mapped from, the one named or one in the cache folder.

    None: it is not there.

    Raises: ConfigError if it belongs to another model or format, CheckpointError if it is damaged.
    """
    file = place_of_packed_weights(checkpoint, spec, packed_weights_file, cache_dir)
    if not file.exists():
        return None
    _read_index(file, spec)
    return file


def place_of_packed_weights(
    checkpoint: Checkpoint, spec: SlabSpec, packed_weights_file: Path | None, cache_dir: Path | None
) -> Path:
    """Return where a model's packed weights are or would be made: the file named, or one in the cache folder."""
    if packed_weights_file is not None:
        return packed_weights_file.absolute()
    return packed_weights_file_place(cache_dir, checkpoint, spec).absolute()


def map_packed(
    checkpoint: Checkpoint,
    config: EngineConfig,
    on_bytes: OnBytes | None = None,
    *,
    as_tensors: bool = True,
) -> WeightMemory:
    """Return the weights of a model that fits into memory, mapped from `config.packed_file`.

    Raises: CheckpointError for another file, and as `map_weights` does. See there for `as_tensors`.
    """
    file, formats = Path(config.packed_file), formats_of(config)
    index = _read_index(file, slab_spec(checkpoint, formats))
    table = layer_table_range(checkpoint, formats, index.spec)
    return map_weights(index, on_bytes, left_on_disk=table, as_tensors=as_tensors)


def find_packed_experts(checkpoint: Checkpoint, formats: WeightFormats, cache_dir: Path | None) -> Path | None:
    """Return packed weights in the cache folder that have a model's experts in these formats; None: none have."""
    wanted = slab_spec(checkpoint, formats)
    for file in sorted((cache_folder(cache_dir) / "experts").glob("*.slabs")):
        with suppress(CheckpointError):
            if read_slab_index(file).spec.has_experts_of(wanted):
                return file.absolute()
    return None


def read_packed_experts(
    checkpoint: Checkpoint, config: EngineConfig, on_bytes: OnBytes | None = None
) -> expert_reader.ReadExperts:
    """Return the memory of experts that a GPU and the CPU share, as packed weights have them.

    Raises: CheckpointError if the file cannot be read, ConfigError if it has other experts.
    """
    assert config.hybrid is not None
    file = Path(config.hybrid.packed_experts_file)
    index = read_slab_index(file)
    if not index.spec.has_experts_of(slab_spec(checkpoint, packed_formats(config))):
        raise ConfigError(f"{file} has experts of another model or format: plan again, or delete the file")
    return expert_reader.ReadExperts(index, on_bytes or ignore)


def ensure_packed_weights_file(
    checkpoint: Checkpoint, file: Path, config: EngineConfig, on_bytes: OnBytes | None = None
) -> SlabIndex:
    """Return what the packed weights of an engine's model hold, after writing them if they are not there.

    Raises: ConfigError if the file belongs to another model or format; as `pack_model` and `read_slab_index` do.
    """
    formats = packed_formats(config)
    spec = slab_spec(checkpoint, formats)
    if not file.exists():
        importance = known_importance(config.importance_file)
        pack_model(checkpoint, file, formats, num_threads=config.num_threads, on_bytes=on_bytes, importance=importance)
    return _read_index(file, spec)


class Damage(msgspec.Struct, frozen=True):
    """A part of packed weights that is not as it was written."""

    part: str  # as messages name it
    tensors: list[str]  # of the checkpoint, that have weights in it
    cause: str


def used_packed_weights_file(config: EngineConfig) -> Path | None:
    """Return the packed weights that an engine would use or make; None: it packs the checkpoint's at its start."""
    name = config.packed_file if config.experts is None else config.experts.packed_weights_file
    return Path(name) if name else None


def find_damage(config: EngineConfig, on_bytes: OnBytes | None = None) -> list[Damage]:
    """Compare the packed weights that an engine would use, which is there, with its checksums: the whole of it.

    Raises: ConfigError if it belongs to another model or format, CheckpointError if its first pages are damaged.
    """
    file, formats = used_packed_weights_file(config), packed_formats(config)
    assert file is not None
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        spec = slab_spec(checkpoint, formats)
        index = _read_index(file, spec)
        return [
            Damage(spec.name(number), names_in_part(checkpoint, formats, spec, number), _cause(error))
            for number, error in damaged_parts(index, on_bytes or ignore)
        ]


def _cause(error: StorageError) -> str:
    cause = error.__cause__
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)


def packed_formats(config: EngineConfig) -> WeightFormats:
    """Return the formats of packed weights on disk: those of the CPU, also where a GPU has others."""
    formats = formats_of(config)
    if config.hybrid is None:
        return formats
    return formats.on_host(cast(WeightFormat, config.hybrid.cpu_weight_format))


def formats_of(config: EngineConfig) -> WeightFormats:
    """Return the formats of an engine's weights."""
    names = (config.weight_format, config.embedding_format, config.router_format)
    matrices, embeddings, routers = (cast(WeightFormat, name) for name in names)
    head, layer_table = (
        cast(WeightFormat, name) if name else None for name in (config.head_format, config.layer_table_format)
    )
    return WeightFormats(
        matrices,
        embeddings,
        routers,
        is_wide=config.is_wide,
        head=head,
        layer_table=layer_table,
        layers=config.layer_formats,
    )


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
    """Make a model's packed weights file, at `out` or where the engine looks for it.

    Compares an existing file with its checksums. Makes it anew if it is damaged, of an older version, or a mix that was
    rounded before the importance of inputs was known.

    Raises: ConfigError if it belongs to another model; CheckpointError, CapacityError.
    """
    if not extension.is_available():
        raise ConfigError(f"weights are packed for the CPU kernels, which are not there: {extension.why_not()}")
    with closing(open_checkpoint(model)) as checkpoint:
        shape = read_model_config(checkpoint)
        asked = explicit_choice(dtype, quantize, shape, can_pack=True)
        choice = asked or own_precision(checkpoint, lambda _: True, can_differ=shape.recurrent is None)
        known = None if choice.mix is None else known_importance_file(checkpoint, cache_dir)
        importance = known_importance("" if known is None else str(known))
        formats = choice.with_routers(checkpoint).formats
        spec = slab_spec(checkpoint, formats)
        file = out or packed_weights_file_place(cache_dir, checkpoint, spec)
        if not file.exists() or not _is_right(file, spec, on_bytes, is_weighted=bool(importance)):
            threads = num_threads or host_resources().num_cores
            pack_model(checkpoint, file, formats, num_threads=threads, on_bytes=on_bytes, importance=importance)
        return _read_index(file, spec)


def carry_predictor(model: str, packed_file: Path) -> Path | None:
    """Copy a network that predicts experts from beside a model to beside its packed weights; return where it lies.

    None: there is none. Raises: as `saved.carry_predictor`.
    """
    with closing(open_checkpoint(model)) as checkpoint:
        return saved.carry_predictor(checkpoint, packed_file)


def _is_right(file: Path, spec: SlabSpec, on_bytes: OnBytes | None, *, is_weighted: bool) -> bool:
    """Return whether a file is whole, and rounded as well as it can be.

    Raises: ConfigError if it is another model's, CheckpointError if not ours.
    """
    try:
        index = _read_index(file, spec)
        if is_weighted and not index.spec.is_weighted:
            return False
        verify_packed_weights_file(index, on_bytes or ignore)
    except (CheckpointError, StorageError):
        if not is_packed_weights_file(file):
            raise
        return False
    return True


def _read_index(file: Path, spec: SlabSpec) -> SlabIndex:
    index = read_slab_index(file)
    if index.spec.fits(spec):
        return index
    if index.spec.weight_format != spec.weight_format:
        what = f"weights in {index.spec.weight_format} instead of {spec.weight_format}"
    elif index.spec.identity != spec.identity:
        what = "the weights of another model, or of this one before its files changed"
    else:
        what = "this model's weights in another arrangement"
    raise ConfigError(f"{file} holds {what}. Name another file, or delete it and pack the model again (`moeflow pack`)")
