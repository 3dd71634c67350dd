"""The facts of a model for clients of Ollama and LM Studio: its size, its kind, its capabilities.

A model that is not loaded is known by its files' sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.gguf.file_names import SUFFIX, gguf_start, whole_name
from moeflow.core.errors import MoeflowError
from moeflow.engine.generator import Generator
from moeflow.engine.messages import ModelInfo
from moeflow.server.served_model import ServedModel

_LATEST: Final = "latest"
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_OLLAMA_NAMES: Final = {"repetition_penalty": "repeat_penalty"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as clients list it. What only a loaded model tells is empty, or None, before."""

    name: str
    file_format: str  # gguf or safetensors
    size_bytes: int  # of its files
    modified_at: datetime
    digest: str  # 64 hexadecimal digits; another one after the files have changed
    memory_bytes: int  # that it may hold while it is loaded, or the size of its files
    info: ModelInfo | None
    template: str
    capabilities: tuple[str, ...]  # in Ollama's words

    @property
    def tagged_name(self) -> str:
        """The name with a tag, as Ollama lists it."""
        return self.name if ":" in self.name else f"{self.name}:{_LATEST}"

    @property
    def architecture(self) -> str:
        """The model's family."""
        return "" if self.info is None else self.info.model_type

    @property
    def quantization(self) -> str:
        """The format of its weights."""
        return "" if self.info is None else self.info.weight_format.upper()

    @property
    def parameter_size(self) -> str:
        """The number of parameters in short, such as 8.0B."""
        count = 0 if self.info is None else self.info.num_parameters
        return next((f"{count / unit:.1f}{letter}" for unit, letter in _UNITS if count >= unit), str(count or ""))

    @property
    def parameters(self) -> dict[str, float]:
        """What holds where a request leaves it out, in Ollama's words."""
        if self.info is None:
            return {}
        defaults = {
            _OLLAMA_NAMES.get(name, name): value for name, value in self.info.sampling_defaults.changes().items()
        }
        return {"num_ctx": self.info.max_model_len, **defaults}

    @property
    def metadata(self) -> dict[str, Any]:
        """What a GGUF file's header would say of it, by GGUF's names."""
        info = self.info
        if info is None:
            return {}
        about: dict[str, Any] = {
            "context_length": info.max_model_len,
            "embedding_length": info.hidden_size,
            "block_count": info.num_layers,
            "vocab_size": info.vocab_size,
        }
        if info.num_experts:
            about |= {"expert_count": info.num_experts, "expert_used_count": info.top_k}
        general = {"general.architecture": info.model_type, "general.parameter_count": info.num_parameters}
        return general | {f"{info.model_type}.{key}": value for key, value in about.items()}


def model_facts(served: ServedModel) -> ModelFacts:
    """Return the facts of a model that has a name.

    Blocks: on looking at files.
    """
    generator = served.generator
    info = None if generator is None else generator.client.model
    path = Path(served.source.path if served.source is not None else served.info.path)
    files = _files(path)
    stats = [file.stat() for file in files]
    size_bytes = sum(each.st_size for each in stats)
    listed = "".join(
        f"{file.name} {each.st_size} {each.st_mtime_ns}\n" for file, each in zip(files, stats, strict=True)
    )
    return ModelFacts(
        name=served.name,
        file_format="gguf" if gguf_start(path).suffix == SUFFIX else "safetensors",
        size_bytes=size_bytes,
        modified_at=datetime.fromtimestamp(max((each.st_mtime for each in stats), default=served.created), UTC),
        digest=sha256(f"{served.name}\n{listed}".encode()).hexdigest(),
        memory_bytes=served.memory_bytes or size_bytes,
        info=info,
        template="" if generator is None else _template(generator),
        capabilities=() if generator is None else _capabilities(generator),
    )


def _files(path: Path) -> Sequence[Path]:
    """Return the model's files: those of its folder, or a GGUF file with its other parts; none that has gone."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    whole = whole_name(str(path))
    return sorted(file for file in path.parent.glob(f"*{SUFFIX}") if file.is_file() and whole_name(str(file)) == whole)


def _template(generator: Generator) -> str:
    try:
        return generator.tokenizer.chat_template
    except MoeflowError:
        return ""


def _capabilities(generator: Generator) -> tuple[str, ...]:
    if not generator.client.model.num_layers:
        return ("embedding",)
    if not _template(generator):
        return ("completion",)
    thinking = ("thinking",) if generator.tokenizer.chat_format.can_reason else ()
    return ("completion", "tools", *thinking)
