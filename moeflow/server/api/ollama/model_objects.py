"""What Ollama's clients get to know of models."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, Field

from moeflow.server.api.model_facts import ModelFacts
from moeflow.server.api.ollama.heads import rfc3339
from moeflow.server.api.schema.strict_model import StrictModel

_NEVER: Final = "2300-01-01T00:00:00Z"  # clients compute with it: some know no later year than 2318
_PARAMETER_WIDTH: Final = 30  # of a name, as Ollama writes them


class OllamaDetails(BaseModel):
    """A model's kind. Unknown fields of one that is not loaded are empty."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """A model that is served, loaded or not."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    """All models of this server."""

    models: list[OllamaModel]


class OllamaLoadedModel(BaseModel):
    """A model that is loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(BaseModel):
    """All models that are loaded."""

    models: list[OllamaLoadedModel]


class OllamaShowRequest(StrictModel):
    """Describe a model."""

    model: str | None = None
    name: str | None = Field(None, description="The older name of model.")
    verbose: bool | None = Field(None, description="Accepted; changes nothing.")
    system: str | None = Field(None, description="Accepted; changes nothing.")
    template: str | None = Field(None, description="Accepted; changes nothing.")
    options: dict[str, Any] | None = Field(None, description="Accepted; changes nothing.")


class OllamaShown(BaseModel):
    """A model in detail. Unknown fields of one that is not loaded are empty."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    """Which version of Ollama's API this is."""

    version: str


def listed(facts: ModelFacts) -> OllamaModel:
    """Return a model as `/api/tags` lists it."""
    name = facts.tagged_name
    return OllamaModel(
        name=name,
        model=name,
        modified_at=rfc3339(facts.modified_at),
        size=facts.size_bytes,
        digest=facts.digest,
        details=_details(facts),
    )


def listed_as_loaded(facts: ModelFacts) -> OllamaLoadedModel:
    """Return a model that is loaded as `/api/ps` lists it."""
    assert facts.info is not None, "only what is loaded is listed"
    name = facts.tagged_name
    return OllamaLoadedModel(
        name=name,
        model=name,
        size=facts.memory_bytes,
        digest=facts.digest,
        details=_details(facts),
        expires_at=_NEVER,
        size_vram=0 if facts.info.device == "cpu" else facts.memory_bytes,
        context_length=facts.info.max_model_len,
    )


def shown(facts: ModelFacts) -> OllamaShown:
    """Return a model as `/api/show` describes it."""
    return OllamaShown(
        modelfile=f"FROM {facts.tagged_name}\n",
        parameters="\n".join(f"{name:<{_PARAMETER_WIDTH}} {value}" for name, value in facts.parameters.items()),
        template=facts.template,
        details=_details(facts),
        model_info=facts.metadata,
        capabilities=[*facts.capabilities],
        modified_at=rfc3339(facts.modified_at),
    )


def _details(facts: ModelFacts) -> OllamaDetails:
    return OllamaDetails(
        format=facts.file_format,
        family=facts.architecture,
        families=[facts.architecture] if facts.architecture else [],
        parameter_size=facts.parameter_size,
        quantization_level=facts.quantization,
    )
