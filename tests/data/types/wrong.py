"""A program with mistakes, each marked with the error that mypy is to report there. Only type checkers read it."""

import moeflow
from moeflow import LLM, LLMSettings, PoolingParams, RequestOutput, SamplingParams

LLM("model", max_model_length=512)  # error: call-arg
LLM("model", max_model_len=[512])  # error: arg-type
LLM("model", max_num_seqs=2.5)  # error: arg-type
LLM("model", prefix_caching="perhaps")  # error: arg-type
LLM("model", dtype=None)  # error: arg-type
LLM("model", cache_dir=3)  # error: arg-type
LLM("model", speculators=["suffix", 2])  # error: list-item
LLM("model", is_served=True)  # error: call-arg
LLM("model", shares_memory=True)  # error: call-arg
LLM(7)  # error: arg-type
settings: LLMSettings = {"num_threads": 2, "max_tokens": 5}  # error: typeddict-unknown-key
SamplingParams(max_new_tokens=5)  # error: call-arg
SamplingParams(temperature="hot")  # error: arg-type
SamplingParams(stop=10)  # error: arg-type
SamplingParams(stop=["\n", 10])  # error: list-item
PoolingParams(kind="max")  # error: arg-type
with LLM() as llm:
    llm.generate("prompt", {"max_tokens": 5})  # error: arg-type
    llm.generate([1.5])  # error: list-item
    llm.chat("How are you?")  # error: arg-type
    result: RequestOutput = llm.generate("prompt")  # error: assignment
    print(llm.generate("prompt")[0].text)  # error: attr-defined
    print(llm.tokens_per_second)  # error: attr-defined
moeflow.SamplingParam(max_tokens=5)  # error: attr-defined
