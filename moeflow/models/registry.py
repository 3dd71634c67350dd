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
from moeflow.core.brief import brief
from moeflow.core.errors import CheckpointError
from moeflow.core.extensions import ExtensibleTable
from moeflow.core.model_config import ConfigReader, ModelConfig
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


class Row(msgspec.Struct, frozen=True):
    """Where a `model_type` is implemented."""

    architecture: str  # the class of transformers that its checkpoints name
    module: str
    more_architectures: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """All classes that checkpoints may name."""
        return (self.architecture, *self.more_architectures)


_OWN: Mapping[str, Row] = {
    "dbrx": Row("DbrxForCausalLM", "moeflow.models.dbrx"),
    "deepseek_v2": Row("DeepseekV2ForCausalLM", "moeflow.models.deepseek_v2"),
    "deepseek_v3": Row("DeepseekV3ForCausalLM", "moeflow.models.deepseek_v3"),
    "dots1": Row("Dots1ForCausalLM", "moeflow.models.dots1"),
    "ernie4_5_moe": Row("Ernie4_5_MoeForCausalLM", "moeflow.models.ernie4_5_moe"),
    "fairseq_moe": Row("TransformerLanguageModel", "moeflow.models.fairseq_moe"),
    "gemma3": Row("Gemma3ForConditionalGeneration", "moeflow.models.gemma3"),
    "gemma3_text": Row("Gemma3ForCausalLM", "moeflow.models.gemma3_text"),
    "gemma4": Row("Gemma4ForConditionalGeneration", "moeflow.models.gemma4"),
    "gemma4_text": Row("Gemma4ForCausalLM", "moeflow.models.gemma4_text"),
    "glm4_moe": Row("Glm4MoeForCausalLM", "moeflow.models.glm4_moe"),
    "glm4_moe_lite": Row("Glm4MoeLiteForCausalLM", "moeflow.models.glm4_moe_lite"),
    "gpt_moe": Row("ParallelGPT", "moeflow.models.gpt_moe"),
    "gpt_oss": Row("GptOssForCausalLM", "moeflow.models.gpt_oss"),
    "granitemoe": Row("GraniteMoeForCausalLM", "moeflow.models.granitemoe"),
    "granitemoehybrid": Row("GraniteMoeHybridForCausalLM", "moeflow.models.granitemoehybrid"),
    "granitemoeshared": Row("GraniteMoeSharedForCausalLM", "moeflow.models.granitemoeshared"),
    "hunyuan_v1_moe": Row("HunYuanMoEV1ForCausalLM", "moeflow.models.hunyuan_v1_moe"),
    "kimi_k2": Row("DeepseekV3ForCausalLM", "moeflow.models.deepseek_v3"),
    "lfm2": Row("Lfm2ForCausalLM", "moeflow.models.lfm2"),
    "lfm2_moe": Row("Lfm2MoeForCausalLM", "moeflow.models.lfm2_moe"),
    "llama": Row("LlamaForCausalLM", "moeflow.models.llama"),
    "minimax_m2": Row("MiniMaxM2ForCausalLM", "moeflow.models.minimax_m2"),
    "mixtral": Row("MixtralForCausalLM", "moeflow.models.mixtral"),
    "olmoe": Row("OlmoeForCausalLM", "moeflow.models.olmoe"),
    "phimoe": Row("PhimoeForCausalLM", "moeflow.models.phimoe", ("PhiMoEForCausalLM",)),
    "qwen2": Row("Qwen2ForCausalLM", "moeflow.models.qwen2"),
    "qwen2_moe": Row("Qwen2MoeForCausalLM", "moeflow.models.qwen2_moe"),
    "qwen3": Row("Qwen3ForCausalLM", "moeflow.models.qwen3"),
    "qwen3_5": Row("Qwen3_5ForConditionalGeneration", "moeflow.models.qwen3_5"),
    "qwen3_5_moe": Row("Qwen3_5MoeForConditionalGeneration", "moeflow.models.qwen3_5_moe"),
    "qwen3_5_moe_text": Row("Qwen3_5MoeForCausalLM", "moeflow.models.qwen3_5_moe_text"),
    "qwen3_5_text": Row("Qwen3_5ForCausalLM", "moeflow.models.qwen3_5_text"),
    "qwen3_moe": Row("Qwen3MoeForCausalLM", "moeflow.models.qwen3_moe"),
    "qwen3_next": Row("Qwen3NextForCausalLM", "moeflow.models.qwen3_next"),
    "switch_transformers": Row(
        "SwitchTransformersForConditionalGeneration",
        "moeflow.models.switch_transformers",
        ("SwitchTransformersEncoderModel", "SwitchTransformersForSequenceClassification"),
    ),
    "t5": Row("T5ForConditionalGeneration", "moeflow.models.t5", ("T5EncoderModel",)),
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
FAMILIES: Final = ExtensibleTable("moeflow.families", _OWN, Row)


def find_family(checkpoint: Checkpoint) -> Family:
    """Return the model file for a checkpoint.

    Raises: CheckpointError, listing what is supported, if there is none.
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
    """Return the shape that a `config.json` describes which has no weights beside it.

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
                f"is for a model of the type {brief(model_type)}, which encodes or classifies text and generates none",
                file=file,
                remedy="Take a model that generates; it makes vectors of text, too (/v1/embeddings)",
            )
        raise CheckpointError(
            f"is a model of the type {brief(model_type)}, which is not supported",
            file=file,
            remedy=f"Supported are {', '.join(FAMILIES)}",
        )
    if architectures and not (
        isinstance(architectures, list) and set(row.architectures) & set(map(str, architectures))
    ):
        raise CheckpointError(
            f"is for {brief(architectures)}, which is not supported",
            file=file,
            remedy=f"Supported of the type {model_type} are {', '.join(row.architectures)}",
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            "says that the weights are quantized, which is not supported in this format",
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
    """Blame a file that is no model's config, or one that lost a line: that line can be told if the class is there."""
    named = architectures if isinstance(architectures, list) else []
    known = [name for name, row in FAMILIES.items() if any(it in named for it in row.architectures)]
    return CheckpointError(
        "has no 'model_type', so it does not say what kind of model this is",
        file=file,
        remedy=f'Add "model_type": "{known[0]}" to it'
        if known
        else f"Take the model's own config.json; supported are the types {', '.join(FAMILIES)}",
    )
