"""A program with mistakes. Each line ignores its expected error: mypy reports an ignored error that does not occur."""

import moeflow
from moeflow import LLM, LLMSettings, PoolingParams, RequestOutput, SamplingParams

LLM("model", max_model_length=512)  # type: ignore[call-arg]
LLM("model", max_model_len=[512])  # type: ignore[arg-type]
LLM("model", max_num_seqs=2.5)  # type: ignore[arg-type]
LLM("model", prefix_caching="perhaps")  # type: ignore[arg-type]
LLM("model", dtype=None)  # type: ignore[arg-type]
LLM("model", cache_dir=3)  # type: ignore[arg-type]
LLM("model", speculators=["suffix", 2])  # type: ignore[list-item]
LLM("model", is_served=True)  # type: ignore[call-arg]
LLM("model", shares_memory=True)  # type: ignore[call-arg]
LLM(7)  # type: ignore[arg-type]
settings: LLMSettings = {"num_threads": 2, "max_tokens": 5}  # type: ignore[typeddict-unknown-key]
SamplingParams(max_new_tokens=5)  # type: ignore[call-arg]
SamplingParams(temperature="hot")  # type: ignore[arg-type]
SamplingParams(stop=10)  # type: ignore[arg-type]
SamplingParams(stop=["\n", 10])  # type: ignore[list-item]
PoolingParams(kind="max")  # type: ignore[arg-type]
with LLM() as llm:
    llm.generate("prompt", {"max_tokens": 5})  # type: ignore[arg-type]
    llm.generate([1.5])  # type: ignore[list-item]
    llm.chat("How are you?")  # type: ignore[arg-type]
    result: RequestOutput = llm.generate("prompt")  # type: ignore[assignment]
    print(llm.generate("prompt")[0].text)  # type: ignore[attr-defined]
    print(llm.tokens_per_second)  # type: ignore[attr-defined]
moeflow.SamplingParam(max_tokens=5)  # type: ignore[attr-defined]
