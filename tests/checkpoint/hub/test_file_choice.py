"""Which files a name means, for lists of files as repositories have them."""

import pytest

from moeflow.checkpoint.hub.file_choice import choose_files, has_choice, shards_of, tag_of
from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.core.errors import CheckpointError

REPO = "o/m"
FOLDER = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "merges.txt",
    "1_Pooling/config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]
OTHERS = [
    "README.md",
    "modeling_evil.py",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "original/params.json",
    "tf_model.h5",
    "onnx/model.onnx",
    ".gitattributes",
]
PARTS = ("big/m-Q6_K-00001-of-00002.gguf", "big/m-Q6_K-00002-of-00002.gguf")
TWO_SPLITS = ["m-Q6_K-00001-of-00001.gguf", "m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf"]
GGUF = [
    "m-Q4_K_M.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-IQ4_XS.gguf",
    "m.Q8_0.gguf",
    "m-bf16.gguf",
    "m-Q4_K_S.gguf",
    "mmproj-m-F16.gguf",
    "imatrix.gguf",
    *PARTS,
]


def test_a_folder_is_its_shards_and_small_files_never_pickles_or_code():
    choice = choose_files(ModelName(REPO), FOLDER + OTHERS + GGUF)
    assert (choice.weights, choice.index) == ((), "model.safetensors.index.json")
    assert sorted(choice.small) == sorted(path for path in FOLDER if not path.endswith(".safetensors"))


def test_a_single_file_goes_before_an_index():
    choice = choose_files(ModelName(REPO), [*FOLDER, "model.safetensors"])
    assert (choice.weights, choice.index) == (("model.safetensors",), None)


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("Q8_0", "m.Q8_0.gguf"),
        ("BF16", "m-bf16.gguf"),
        ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        ("Q6_K", PARTS),
        ("m-Q6_K.gguf", PARTS),
        ("big/m-Q6_K.gguf", PARTS),
        ("m-Q6_K-00001-of-00002.gguf", PARTS),
    ],
)
def test_a_tag_or_a_name_means_one_gguf_file_or_all_its_parts(file, chosen):
    choice = choose_files(ModelName(REPO, file=file), GGUF)
    weights = (chosen,) if isinstance(chosen, str) else chosen
    assert (choice.weights, choice.small, choice.is_gguf) == (weights, (), True)


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("Q4_K_M", "Q4_K_M/model-00001-of-00002.gguf"),
        ("q8_0", "x.Q8_0/m-00001-of-00001.gguf"),
        ("BF16", "BF16/a-BF16-00001-of-00002.gguf"),
        ("Q5_0", "m-Q5_0.gguf"),
        ("m-Q5_0-00002-of-00003.gguf", "m-Q5_0-00001-of-00003.gguf"),
        ("Q6_K", "m-Q6_K-00001-of-00002.gguf"),
    ],
)
def test_folders_tell_quantizations_and_whole_models_go_first(file, chosen):
    paths = [
        *(f"Q4_K_M/model-0000{number}-of-00002.gguf" for number in (1, 2)),
        "x.Q8_0/m-00001-of-00001.gguf",
        *(f"BF16/a-BF16-0000{number}-of-00002.gguf" for number in (2, 1)),
        "m-Q5_0.gguf",
        *(f"m-Q5_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)),
        *(f"m-Q6_K-0000{number}-of-00002.gguf" for number in (1, 2)),
        "m-Q6_K-00003-of-00003.gguf",
    ]
    weights = choose_files(ModelName(REPO, file=file), paths).weights
    assert weights[0] == chosen
    assert len(weights) == (1 if "-of-" not in chosen else int(chosen[-6]))


@pytest.mark.parametrize(
    ("file", "paths", "said"),
    [
        ("Q4_K", GGUF, "has no GGUF file 'Q4_K': there are BF16, IQ4_XS, Q4_K_M, Q4_K_S, Q6_K, Q8_0, UD-Q4_K_M"),
        ("Q6_K", GGUF[:-1], "is in 2 parts, of which big/m-Q6_K-00002-of-00002.gguf is missing"),
        ("Q6_K", ["m-Q6_K-00600-of-00600.gguf"], "is in 600 parts, where at most 512 are expected"),
        ("Q6_K", TWO_SPLITS, "may mean m-Q6_K-00001-of-00001.gguf or m-Q6_K-00001-of-00002.gguf"),
        ("F16", GGUF, "has no GGUF file 'F16'"),
        ("Q8_0", FOLDER, "has no GGUF files"),
        ("", ["a-Q8_0.gguf", "a-Q5_0.gguf"], "several GGUF files, none of them Q4_K_M: there are Q5_0, Q8_0"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "may mean a-Q8_0.gguf or b-Q8_0.gguf"),
        ("", ["pytorch_model.bin", "config.json"], "as pickles only"),
        ("", ["README.md"], "has neither safetensors"),
        ("", ["adapter_config.json", "adapter_model.safetensors"], "holds an adapter"),
        ("", ["model_index.json", "unet/config.json"], "holds a diffusers pipeline"),
        ("", ["config.json", "diffusion_pytorch_model.safetensors"], "a part of a diffusers pipeline"),
    ],
)
def test_what_is_not_clear_is_an_error_that_says_what_there_is(file, paths, said):
    with pytest.raises(CheckpointError, match=said.replace("(", "\\(")):
        choose_files(ModelName(REPO, file=file), paths)


def test_the_only_gguf_file_needs_no_tag():
    assert choose_files(ModelName(REPO), ["a-Q8_0.gguf", "mmproj.gguf"]).weights == ("a-Q8_0.gguf",)
    assert has_choice(ModelName(REPO), ["a-Q8_0.gguf"])
    assert not has_choice(ModelName(REPO, file="Q4_K_M"), ["a-Q8_0.gguf"])
    assert not has_choice(ModelName(REPO), ["config.json"])


def test_a_file_without_a_known_tag_is_called_by_its_name():
    assert (tag_of("x/model.gguf"), tag_of("m-UD-IQ1_S.gguf")) == ("model.gguf", "UD-IQ1_S")
    assert tag_of("x/model-00001-of-00002.gguf") == "model.gguf"
    assert tag_of("m-NVFP4.gguf") == "NVFP4"


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": {"a": "../x.safetensors"}}, {"weight_map": {"a": 1}}]
)
def test_an_index_that_names_no_files_beside_it_is_refused(index):
    with pytest.raises(CheckpointError, match="names"):
        shards_of(index, ModelName(REPO))
    assert shards_of({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}, ModelName(REPO)) == (
        "x.safetensors",
    )
