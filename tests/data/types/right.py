"""A correct program that uses all public names. Only type checkers read it."""

from pathlib import Path
from typing import Unpack, assert_type

import torch

import moeflow
from moeflow import (
    LLM,
    CapacityError,
    CheckpointError,
    CompletionOutput,
    ConfigError,
    EngineError,
    LLMSettings,
    MoeflowError,
    PoolingParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)


def load(model: str | Path | None, **settings: Unpack[LLMSettings]) -> LLM:
    return LLM(model, on_progress=lambda done, total: print(done / total), **settings)


small: LLMSettings = {"memory": "4GiB", "num_threads": "2", "cache_dir": "~/models"}
with load("folder", **small) as llm:
    assert_type(llm, LLM)

llm = LLM(
    Path("model.gguf"),
    dtype=torch.bfloat16,
    kv_dtype="int8",
    device=torch.device("cpu"),
    memory_bytes=2**32,
    kv_cache_bytes=None,
    num_threads=2,
    prefix_caching=False,
    prompt_cache=Path("prompts"),
    speculators=["suffix"],
    resident_experts=0.5,
)
sampling = SamplingParams(n=2, max_tokens=None, temperature=0, stop=("\n",), logit_bias={7: -1}, seed=3, logprobs=1)
lines, ends = SamplingParams(stop="\n"), SamplingParams(stop=["\n", "."], stop_token_ids=[7])
results = llm.generate(["one prompt", [1, 2, 3]], [sampling, SamplingParams()], progress=False)
assert_type(results, list[RequestOutput])
assert_type(results[0].outputs, list[CompletionOutput])
assert_type(results[0].prompt_token_ids, list[int])
completion = results[0].outputs[0]
assert_type(completion.text, str)
assert_type(completion.token_ids, list[int])
assert_type(completion.stop_reason, int | str | None)
print(completion.finish_reason == "stop", [token.logprob + token.rank for token in completion.logprobs or []])
print([token.text for token in results[0].prompt_logprobs or [] if token is not None])

question = [{"role": "user", "content": "How are you?"}]
pictured = [{"role": "user", "content": [{"type": "text", "text": "How are you?"}]}]
assert_type(llm.chat(question), list[RequestOutput])
assert_type(llm.chat([question, question], sampling), list[RequestOutput])
assert_type(llm.chat(pictured), list[RequestOutput])
for piece in llm.stream(question, sampling):
    assert_type(piece.text, str)
assert_type(llm.embed("a text"), list[list[float]])
assert_type(llm.embed([[1, 2, 3]], pooling=PoolingParams(kind="mean", dimensions=64)), list[list[float]])
assert_type(llm.classify(["a text"]), list[dict[str, float]])
assert_type(llm.stats().generated_tokens_total, int)
assert_type(llm.model.max_model_len, int)
assert_type(llm.tokenizer.encode("a text"), list[int])
with LLM.from_plan(llm.plan) as planned:
    assert_type(planned, LLM)
llm.close()

try:
    load(None)
except RequestError as error:
    assert_type(error.param, str | None)
except CheckpointError as error:
    assert_type(error.file, str | None)
except EngineError as error:
    assert_type(error.is_from_outside, bool)
except (ConfigError, CapacityError, MoeflowError) as error:
    print(error, moeflow.__version__.upper())
