import importlib
import json

import pytest
import transformers

from moeflow.core.errors import CheckpointError
from moeflow.models.registry import FAMILIES, read_bare_config
from moeflow.planner.model_files import shipped_models
from tests.models.fake_checkpoint import shape_of
from tests.models.tiny_config import CONFIG


def read(**changes):
    return shape_of(CONFIG | changes)


OF_OTHER_FILES = {"fairseq_moe", "gpt_moe"}  # which transformers does not read
OWN_NAMES = {"kimi_k2": "deepseek_v3"}  # of models that are another family's


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_row_is_a_family_of_transformers_with_a_file_of_its_name(model_type):
    row, model_type = FAMILIES[model_type], OWN_NAMES.get(model_type, model_type)
    assert row.module == f"moeflow.models.families.{model_type}"
    if model_type not in OF_OTHER_FILES:
        assert getattr(transformers, row.architecture).config_class.model_type == model_type
    module = importlib.import_module(row.module)
    assert callable(module.read_config)
    assert callable(module.build)


def test_a_config_becomes_the_models_shape():
    config = read()
    assert config.model_type == "mixtral"
    assert (config.routing.num_experts, config.routing.top_k, config.attention.head_dim) == (3, 2, 4)
    assert config.attention.rope.theta == 1e6


@pytest.mark.parametrize("model_type", ["gpt2", 7, ["llama"]])
def test_an_unknown_model_type_lists_what_is_supported(model_type):
    with pytest.raises(CheckpointError, match="not supported") as error:
        read(model_type=model_type)
    assert all(name in error.value.remedy for name in FAMILIES)
    assert error.value.file == "/models/fake/config.json"


def test_a_config_without_a_type_is_told_what_to_add_if_the_class_says_it():
    with pytest.raises(CheckpointError, match="no 'model_type'") as error:
        read(model_type=None, architectures=None)
    assert all(name in error.value.remedy for name in FAMILIES)
    with pytest.raises(CheckpointError, match=r'Add "model_type": "mixtral"'):
        read(model_type=None, architectures=["MixtralForCausalLM"])


@pytest.mark.parametrize("architectures", [7, {"a": 1}, "LlamaForCausalLM", ["Other"]])
def test_another_class_on_a_known_family_is_refused(architectures):
    with pytest.raises(CheckpointError, match=r"is for .*not supported"):
        read(architectures=architectures)


def test_another_head_on_a_known_family_is_refused():
    with pytest.raises(CheckpointError, match="MixtralForSequenceClassification"):
        read(architectures=["MixtralForSequenceClassification"])


def test_a_family_may_have_classes_of_other_names():
    assert "PhiMoEForCausalLM" in FAMILIES["phimoe"].architectures  # as Phi-3.5-MoE is published


@pytest.mark.parametrize("architectures", [None, []])
def test_a_config_need_not_name_its_class(architectures):
    assert read(architectures=architectures).model_type == "mixtral"


def test_quantized_weights_are_refused():
    with pytest.raises(CheckpointError, match="quantized"):
        read(quantization_config={"quant_method": "gptq", "bits": 4})


def test_a_bare_config_is_enough_for_the_shape(tmp_path):
    file = tmp_path / "config.json"
    raw = json.loads(shipped_models()["mixtral-8x7b"].read_text())
    file.write_text(json.dumps(raw))
    assert read_bare_config(file).num_parameters == pytest.approx(46.7e9, rel=0.01)
    file.write_text(json.dumps({**raw, "model_type": "bert"}))
    with pytest.raises(CheckpointError, match="bert"):
        read_bare_config(file)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("dbrx", 131.6),
        ("gpt-moe", 6.7),
        ("gpt-oss-20b", 20.9),
        ("mixtral-8x22b", 140.6),
        ("mixtral-8x7b", 46.7),
        ("olmoe-1b-7b", 6.92),
        ("qwen3-30b-a3b", 30.5),
    ],
)
def test_the_shipped_shapes_have_the_published_sizes(name, billions):
    assert read_bare_config(shipped_models()[name]).num_parameters == pytest.approx(billions * 1e9, rel=0.005)
