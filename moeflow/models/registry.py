"""Which model families there are. A family is a module with `read_config` and `build`, and one row here or an entry
point of another package.

Modules are imported when a checkpoint asks for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.json_file import read_json_object
from moeflow.core.errors import CheckpointError
from moeflow.core.extensions import ExtensibleTable
from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.plausibility import check_sizes, read_eos_token_ids

if TYPE_CHECKING:
    from moeflow.models.language_model import LanguageModel


class Family(Protocol):
    """What a model file offers."""

    def read_config(self, reader: ConfigReader) -> ModelConfig:
        """Read `config.json`. Raises: CheckpointError."""
        ...

    def build(self, config: ModelConfig, allocator: WeightAllocator) -> LanguageModel:
        """Return the model with its weights still to be filled."""
        ...


class FamilyRow(msgspec.Struct, frozen=True):
    """Where a `model_type` is implemented."""

    architecture: str  # the class of transformers that its checkpoints name
    module: str
    more_architectures: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """All classes that checkpoints may name."""
        return (self.architecture, *self.more_architectures)


_OWN: Mapping[str, FamilyRow] = {
    "dbrx": FamilyRow("DbrxForCausalLM", "moeflow.models.families.dbrx"),
    "deepseek_v2": FamilyRow("DeepseekV2ForCausalLM", "moeflow.models.families.deepseek_v2"),
    "deepseek_v3": FamilyRow("DeepseekV3ForCausalLM", "moeflow.models.families.deepseek_v3"),
    "dots1": FamilyRow("Dots1ForCausalLM", "moeflow.models.families.dots1"),
    "ernie4_5_moe": FamilyRow("Ernie4_5_MoeForCausalLM", "moeflow.models.families.ernie4_5_moe"),
    "fairseq_moe": FamilyRow("TransformerLanguageModel", "moeflow.models.families.fairseq_moe"),
    "gemma3": FamilyRow("Gemma3ForConditionalGeneration", "moeflow.models.families.gemma3"),
    "gemma3_text": FamilyRow("Gemma3ForCausalLM", "moeflow.models.families.gemma3_text"),
    "gemma4": FamilyRow("Gemma4ForConditionalGeneration", "moeflow.models.families.gemma4"),
    "gemma4_text": FamilyRow("Gemma4ForCausalLM", "moeflow.models.families.gemma4_text"),
    "glm4_moe": FamilyRow("Glm4MoeForCausalLM", "moeflow.models.families.glm4_moe"),
    "glm4_moe_lite": FamilyRow("Glm4MoeLiteForCausalLM", "moeflow.models.families.glm4_moe_lite"),
    "gpt_moe": FamilyRow("ParallelGPT", "moeflow.models.families.gpt_moe"),
    "gpt_oss": FamilyRow("GptOssForCausalLM", "moeflow.models.families.gpt_oss"),
    "granitemoe": FamilyRow("GraniteMoeForCausalLM", "moeflow.models.families.granitemoe"),
    "granitemoehybrid": FamilyRow("GraniteMoeHybridForCausalLM", "moeflow.models.families.granitemoehybrid"),
    "granitemoeshared": FamilyRow("GraniteMoeSharedForCausalLM", "moeflow.models.families.granitemoeshared"),
    "hunyuan_v1_moe": FamilyRow("HunYuanMoEV1ForCausalLM", "moeflow.models.families.hunyuan_v1_moe"),
    "kimi_k2": FamilyRow("DeepseekV3ForCausalLM", "moeflow.models.families.deepseek_v3"),
    "lfm2": FamilyRow("Lfm2ForCausalLM", "moeflow.models.families.lfm2"),
    "lfm2_moe": FamilyRow("Lfm2MoeForCausalLM", "moeflow.models.families.lfm2_moe"),
    "llama": FamilyRow("LlamaForCausalLM", "moeflow.models.families.llama"),
    "minimax_m2": FamilyRow("MiniMaxM2ForCausalLM", "moeflow.models.families.minimax_m2"),
    "mixtral": FamilyRow("MixtralForCausalLM", "moeflow.models.families.mixtral"),
    "olmoe": FamilyRow("OlmoeForCausalLM", "moeflow.models.families.olmoe"),
    "phimoe": FamilyRow("PhimoeForCausalLM", "moeflow.models.families.phimoe", ("PhiMoEForCausalLM",)),
    "qwen2": FamilyRow("Qwen2ForCausalLM", "moeflow.models.families.qwen2"),
    "qwen2_moe": FamilyRow("Qwen2MoeForCausalLM", "moeflow.models.families.qwen2_moe"),
    "qwen3": FamilyRow("Qwen3ForCausalLM", "moeflow.models.families.qwen3"),
    "qwen3_5": FamilyRow("Qwen3_5ForConditionalGeneration", "moeflow.models.families.qwen3_5"),
    "qwen3_5_moe": FamilyRow("Qwen3_5MoeForConditionalGeneration", "moeflow.models.families.qwen3_5_moe"),
    "qwen3_5_moe_text": FamilyRow("Qwen3_5MoeForCausalLM", "moeflow.models.families.qwen3_5_moe_text"),
    "qwen3_5_text": FamilyRow("Qwen3_5ForCausalLM", "moeflow.models.families.qwen3_5_text"),
    "qwen3_moe": FamilyRow("Qwen3MoeForCausalLM", "moeflow.models.families.qwen3_moe"),
    "qwen3_next": FamilyRow("Qwen3NextForCausalLM", "moeflow.models.families.qwen3_next"),
    "switch_transformers": FamilyRow(
        "SwitchTransformersForConditionalGeneration",
        "moeflow.models.families.switch_transformers",
        ("SwitchTransformersEncoderModel", "SwitchTransformersForSequenceClassification"),
    ),
    "t5": FamilyRow("T5ForConditionalGeneration", "moeflow.models.families.t5", ("T5EncoderModel",)),
}
_ENCODERS: Final = frozenset(  # often met, with classes that do not tell it
    [
        "albert",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    ]
)
_ENCODER_CLASSES: Final = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_STORED_HEAD: Final = "lm_head.weight"
FAMILIES: Final = ExtensibleTable("moeflow.families", _OWN, FamilyRow)


def find_family(checkpoint: Checkpoint) -> Family:
    """Return the model file for a checkpoint.

    Raises: CheckpointError, listing the supported ones, if there is none.
    """
    return _family(checkpoint.config, checkpoint.config_file)


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the model's shape.

    Raises: CheckpointError if the family is not supported, its config is incomplete or contradictory, or describes a
    model of quite another size than the weights are.
    """
    config = find_family(checkpoint).read_config(ConfigReader(checkpoint.config, checkpoint.config_file))
    if _STORED_HEAD in checkpoint.tensors and not config.is_encoder_only:
        # As transformers reads a config that contradicts the files.
        config = config.with_fields(tie_word_embeddings=False)
    check_sizes(config, checkpoint)
    read_eos_token_ids(checkpoint)
    return config


def read_bare_config(file: Path) -> ModelConfig:
    """Return the shape described by a `config.json` without weights.

    Raises: CheckpointError as `read_model_config`, and if the file cannot be read.
    """
    config = read_json_object(file)
    return _family(config, file).read_config(ConfigReader(config, file))


def _family(config: Mapping[str, Any], file: Path) -> Family:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if isinstance(architectures, str):
        architectures = [architectures]
    if model_type is None:
        raise _without_type(architectures, file)
    row = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if row is None:
        if _makes_no_text(model_type, architectures):
            raise CheckpointError(
                f"is for a model of the type {truncated_repr(model_type)}, which encodes or classifies text and "
                "generates none",
                file=file,
                remedy="Take a model that generates; it makes vectors of text, too (/v1/embeddings)",
            )
        raise CheckpointError(
            f"is a model of the type {truncated_repr(model_type)}, which is not supported",
            file=file,
            remedy=f"Supported are {', '.join(FAMILIES)}",
        )
    if architectures and not (
        isinstance(architectures, list) and set(row.architectures) & set(map(str, architectures))
    ):
        raise CheckpointError(
            f"is for {truncated_repr(architectures)}, which is not supported",
            file=file,
            remedy=f"Supported of the type {model_type} are {', '.join(row.architectures)}",
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            "has quantized weights, which is not supported in this format",
            file=file,
            remedy="Take the model's unquantized weights, or a GGUF file",
        )
    return cast(Family, importlib.import_module(row.module))


def _makes_no_text(model_type: Any, architectures: Any) -> bool:
    named = architectures if isinstance(architectures, list) else []
    return (isinstance(model_type, str) and model_type in _ENCODERS) or any(
        isinstance(name, str) and name.endswith(_ENCODER_CLASSES) for name in named
    )


def _without_type(architectures: Any, file: Path) -> CheckpointError:
    """Blame a file that is not a model's config, or lost a line: the class, if present, identifies that line."""
    named = architectures if isinstance(architectures, list) else []
    known = [name for name, row in FAMILIES.items() if any(it in named for it in row.architectures)]
    return CheckpointError(
        "has no 'model_type', so the kind of model is unknown",
        file=file,
        remedy=f'Add "model_type": "{known[0]}" to it'
        if known
        else f"Take the model's own config.json; supported are the types {', '.join(FAMILIES)}",
    )
