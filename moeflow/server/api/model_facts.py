"""The facts of a model for clients of Ollama and LM Studio: its size, its kind, its capabilities.

The headers of its files describe a model that is not loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.gguf.file_names import SUFFIX, gguf_start, whole_name
from moeflow.core.engine_messages import ModelInfo
from moeflow.core.errors import MoeflowError
from moeflow.engine.generator import Generator
from moeflow.models.file_facts import FileFacts
from moeflow.server.api.models import planned_context
from moeflow.server.served_model import ServedModel

_LATEST: Final = "latest"
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_OLLAMA_NAMES: Final = {"repetition_penalty": "repeat_penalty"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as clients list it. Facts that only a loaded model has are empty, or None, before."""

    name: str
    file_format: str  # gguf or safetensors
    size_bytes: int  # of its files
    modified_at: datetime
    digest: str  # 64 hexadecimal digits; another one after the files have changed
    memory_bytes: int  # that it may hold while it is loaded, or the size of its files
    info: ModelInfo | None
    headers: FileFacts | None  # None: its files cannot be read
    context_length: int | None  # tokens; before it is loaded, at most
    template: str
    capabilities: tuple[str, ...]  # in Ollama's words

    @property
    def tagged_name(self) -> str:
        """The name with a tag, as Ollama lists it."""
        return self.name if ":" in self.name else f"{self.name}:{_LATEST}"

    @property
    def architecture(self) -> str:
        """The model's family."""
        if self.info is not None:
            return self.info.model_type
        return "" if self.headers is None else self.headers.model_type

    @property
    def quantization(self) -> str:
        """The format of its weights."""
        return "" if self.info is None else self.info.weight_format.upper()

    @property
    def parameter_size(self) -> str:
        """The number of parameters in short, such as 8.0B."""
        count = self._num_parameters
        return next((f"{count / unit:.1f}{letter}" for unit, letter in _UNITS if count >= unit), str(count or ""))

    @property
    def _num_parameters(self) -> int:
        if self.info is not None:
            return self.info.num_parameters
        return 0 if self.headers is None else self.headers.num_parameters

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
        info, described = self.info, self.info or self.headers
        if described is None:
            return {}
        about: dict[str, Any] = {"context_length": self.context_length, "vocab_size": described.vocab_size}
        if info is not None:
            about |= {"embedding_length": info.hidden_size, "block_count": info.num_layers}
        if info is not None and info.num_experts:
            about |= {"expert_count": info.num_experts, "expert_used_count": info.top_k}
        general = {"general.architecture": described.model_type, "general.parameter_count": described.num_parameters}
        return general | {f"{described.model_type}.{key}": value for key, value in about.items()}


async def model_facts(served: ServedModel) -> ModelFacts:
    """Return the facts of a model that has a name."""
    return await asyncio.to_thread(_facts, served, await served.file_facts())


def _facts(served: ServedModel, headers: FileFacts | None) -> ModelFacts:
    generator = served.generator
    info = None if generator is None else generator.client.model
    path = Path(served.source.path if served.source is not None else served.info.path)
    stats = _stats(path)
    size_bytes = sum(each.st_size for each in stats.values())
    modified_s = max((each.st_mtime for each in stats.values()), default=served.created)
    listed = "".join(f"{name} {each.st_size} {each.st_mtime_ns}\n" for name, each in stats.items())
    return ModelFacts(
        name=served.name,
        file_format="gguf" if gguf_start(path).suffix == SUFFIX else "safetensors",
        size_bytes=size_bytes,
        modified_at=datetime.fromtimestamp(modified_s, UTC),
        digest=sha256(f"{served.name}\n{listed}".encode()).hexdigest(),
        memory_bytes=served.memory_bytes or size_bytes,
        info=info,
        headers=headers,
        context_length=planned_context(served, headers) if info is None else info.max_model_len,
        template="" if generator is None else _template(generator),
        capabilities=() if generator is None else _capabilities(generator),
    )


def _stats(path: Path) -> dict[str, os.stat_result]:
    """Return the model's files by name: those of its folder, or a GGUF file and its other parts. None that has gone."""
    stats = {}
    with contextlib.suppress(OSError):
        for file in sorted(path.iterdir()) if path.is_dir() else _parts(path):
            with contextlib.suppress(FileNotFoundError):
                if file.is_file():
                    stats[file.name] = file.stat()
    return stats


def _parts(path: Path) -> list[Path]:
    whole = whole_name(str(path))
    return sorted(file for file in path.parent.glob(f"*{SUFFIX}") if whole_name(str(file)) == whole)


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
