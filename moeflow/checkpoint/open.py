"""Which reader a path needs. Readers are imported when a path needs them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.file_errors import blame_file
from moeflow.checkpoint.gguf.file_names import gguf_start
from moeflow.checkpoint.other_kinds import refuse_other_folder
from moeflow.checkpoint.quantized.settings import QuantizationSettings
from moeflow.checkpoint.regular_file import open_stream, stat_file
from moeflow.checkpoint.renamed.registry import with_known_names
from moeflow.checkpoint.safetensors.folder import CONVERT_PICKLE, PICKLE_SUFFIXES, SafetensorsFolder
from moeflow.core.errors import CheckpointError
from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    from moeflow.checkpoint.fairseq import folder as fairseq
    from moeflow.checkpoint.faster_transformer import folder as faster_transformer
    from moeflow.checkpoint.gguf import file as gguf_file
    from moeflow.checkpoint.gguf import latent as gguf_latent
    from moeflow.checkpoint.megatron import folder as megatron_folder
    from moeflow.checkpoint.megatron import part_files as megatron_parts
    from moeflow.checkpoint.quantized import folder as quantized_folder

_WHAT_TO_NAME = "Name a Hugging Face folder (config.json and safetensors) or a .gguf file on this machine"
_PULL = "`moeflow pull OWNER/NAME` fetches it"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, or a folder of another framework; reads headers only.

    A part of a GGUF model, and a folder with one, stand for the whole of it.

    Raises: CheckpointError if there is nothing of the kind, or it is damaged or not supported.
    """
    path = Path(path)
    if "\0" in str(path) or not os.path.lexists(path):
        raise CheckpointError("does not exist", file=path, remedy=_WHAT_TO_NAME + f", or a model by its name; {_PULL}")
    path = gguf_start(path)
    mode = stat_file(path).st_mode
    if stat.S_ISDIR(mode):
        with blame_file(path):
            refuse_other_folder(path)
        if not _has_safetensors(path) and megatron_parts.is_megatron_folder(path):
            return megatron_folder.MegatronFolder(path)
        if not os.path.lexists(path / "config.json"):
            if fairseq.is_fairseq_folder(path):
                return fairseq.FairseqFolder(path)
            if faster_transformer.is_faster_transformer_folder(path):
                return faster_transformer.FasterTransformerFolder(path)
        folder = SafetensorsFolder(path)
        settings = QuantizationSettings.of(folder.config, folder.quantization_file)
        return with_known_names(folder if settings is None else quantized_folder.QuantizedFolder(folder, settings))
    if not stat.S_ISREG(mode):
        raise CheckpointError("is no regular file", file=path, remedy=_WHAT_TO_NAME)
    if path.suffix == ".gguf" or _has_gguf_magic(path):
        return gguf_latent.with_joined_projections(gguf_file.GGUFFile(path))
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError("holds pickled weights", file=path, remedy=CONVERT_PICKLE)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(
            "is one file of a model in Hugging Face form", file=path, remedy=f"Name its folder: {path.parent}"
        )
    raise CheckpointError("is no kind of model file that is known here", file=path, remedy=_WHAT_TO_NAME)


def _has_safetensors(folder: Path) -> bool:
    with blame_file(folder):
        return any(name.endswith(".safetensors") for name in os.listdir(folder))


def _has_gguf_magic(path: Path) -> bool:
    with open_stream(path) as stream, blame_file(path):
        return stream.read(4) == b"GGUF"
