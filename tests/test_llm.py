"""The offline API on a real engine with a tiny random Mixtral, against transformers' own generation."""

import signal

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moeflow.core.errors import ConfigError, EngineError, RequestError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.kernels.interrupts import hold_interrupts
from moeflow.llm import LLM
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.fakes import byte_level_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["the quick brown fox", "2 of 8, say", "naïve 你好", "dog"]
QUESTION = [{"role": "user", "content": "What is the fox?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-mixtral")
    tokenizer = byte_level_tokenizer()
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        eos_token_id=0,
        initializer_range=0.5,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, num_threads=1, max_num_seqs=3, kv_cache_bytes=2**20, max_num_batched_tokens=16) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")._engine
        while engine.has_work:
            engine.step()
        engine.check_integrity()
        assert engine.stats().num_running == engine.stats().num_waiting == 0


def expected_text(folder, prompt):
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokenizer = byte_level_tokenizer()
    ids = torch.tensor([tokenizer.encode(prompt)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :].tolist())


def test_greedy_results_are_transformers_in_the_order_of_the_prompts(llm, folder):
    results = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [result.prompt for result in results] == PROMPTS
    assert [result.outputs[0].text for result in results] == [expected_text(folder, prompt) for prompt in PROMPTS]
    assert all(result.outputs[0].finish_reason == "length" for result in results)
    assert all(len(result.outputs[0].token_ids) == 8 for result in results)


def test_one_prompt_and_token_ids(llm):
    (as_text,) = llm.generate(PROMPTS[0], GREEDY, progress=False)
    (as_ids,) = llm.generate([llm.tokenizer.encode(PROMPTS[0])], GREEDY, progress=False)
    assert as_text.outputs == as_ids.outputs
    assert as_text.prompt_token_ids == as_ids.prompt_token_ids
    assert as_ids.prompt is None
    assert llm.generate([], GREEDY, progress=False) == []


def test_params_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=1) for count in (1, 5)]
    results = llm.generate(PROMPTS[:2], params, progress=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5]
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(PROMPTS[:1], params, progress=False)


def test_n_completions_repeat_with_the_seed_and_whatever_the_batch(llm):
    params = SamplingParams(n=4, seed=11, max_tokens=6, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[0], params, progress=False)
    crowd = llm.generate([*PROMPTS[1:], PROMPTS[0]], params, progress=False)
    assert alone.outputs == crowd[-1].outputs
    assert [output.index for output in alone.outputs] == [0, 1, 2, 3]
    assert len({output.text for output in alone.outputs}) > 1


def test_logprobs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (result,) = llm.generate(PROMPTS[0], params, progress=False)
    output = result.outputs[0]
    assert [token.token_id for token in output.logprobs] == output.token_ids
    assert all(token.rank == 1 and token.top[0].token_id == token.token_id for token in output.logprobs)
    assert [token and token.token_id for token in result.prompt_logprobs] == [None, *result.prompt_token_ids[1:]]


def test_a_stop_string_ends_one_completion(llm):
    (plain,) = llm.generate(PROMPTS[0], GREEDY, progress=False)
    text = plain.outputs[0].text
    stop = text[2:4]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=stop)
    (result,) = llm.generate(PROMPTS[0], params, progress=False)
    output = result.outputs[0]
    assert (output.text, output.stop_reason) == (text[: text.index(stop)], stop)
    assert output.finish_reason is FinishReason.STOP


def test_chat(llm):
    (result,) = llm.chat(QUESTION, GREEDY, progress=False)
    assert result.prompt_token_ids == llm.tokenizer.apply_chat_template(QUESTION)
    assert llm.chat([QUESTION, QUESTION], GREEDY, progress=False)[1].outputs == result.outputs
    assert "".join(delta.text for delta in llm.stream(QUESTION, GREEDY)) == result.outputs[0].text


def test_bad_prompts_are_refused_before_any_runs(llm):
    before = llm._engine.stats().prompt_tokens_total
    for bad in (["fine", ""], [[1], [10**6]], ["x" * 1000], [1, 2, 3]):
        with pytest.raises(RequestError):
            llm.generate(bad, GREEDY, progress=False)
    with pytest.raises(RequestError, match="role"):
        llm.stream([{"content": "x"}])
    for bad in (None, 5, b"x", {"a": 1}, [1, 2, 3]):
        for verb in (llm.generate, llm.embed):
            with pytest.raises(RequestError, match=r"^prompts ") as caught:
                verb(bad, progress=False)
            assert caught.value.param == "prompts"
    for bad in ("hi", None, 5, ["hi"], [["hi"]], QUESTION[0], [QUESTION, "hi"]):
        with pytest.raises(RequestError, match=r'^a conversation must be a list such as \[{"role"'):
            llm.chat(bad, progress=False)
    for bad in ("hi", None, 5, ["hi"], QUESTION[0]):
        with pytest.raises(RequestError, match=r"^a conversation must be a list .*, not .*use generate$"):
            llm.stream(bad)
    for bad in ({"temperature": 0}, 5, "x", [None]):
        with pytest.raises(RequestError, match=r"^sampling_params must be SamplingParams\(\.\.\.\)"):
            llm.generate(["x"], bad, progress=False)
    assert llm._engine.stats().prompt_tokens_total == before


def test_prompts_may_come_from_an_iterator(llm):
    expected = llm.generate(PROMPTS, GREEDY, progress=False)
    assert llm.generate(iter(PROMPTS), GREEDY, progress=False) == expected
    assert llm.chat(iter(QUESTION), GREEDY, progress=False) == llm.chat(QUESTION, GREEDY, progress=False)


def test_leaving_a_stream_cancels_it(llm):
    stream = llm.stream(QUESTION, GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="another generation"):
        llm.generate(PROMPTS, GREEDY, progress=False)
    stream.close()
    assert len(llm.generate(PROMPTS, GREEDY, progress=False)) == len(PROMPTS)


def test_ctrl_c_stops_between_passes_and_leaves_the_engine_usable(llm, monkeypatch):
    engine, passes = llm._engine, []

    def step_with_ctrl_c():
        passes.append(None)
        if len(passes) == 3:
            signal.raise_signal(signal.SIGINT)
        return type(engine).step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", step_with_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, progress=False)
    assert len(passes) == 3
    engine.check_integrity()
    assert len(llm.generate(PROMPTS, GREEDY, progress=False)) == len(PROMPTS)


def test_held_interrupts_come_at_the_end_to_whoever_handles_them():
    seen = []
    previous = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            seen.append("inside")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == ["inside", "handled"]


def test_the_progress_bar_counts_completions(llm, capsys):
    llm.generate(PROMPTS, GREEDY, progress=True)
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    assert "tokens/s" in shown.err
    assert shown.out == ""


def test_settings(folder):
    reports = []
    settings = Settings(model=str(folder), num_threads=1, max_model_len=64, model_name="tiny", kv_cache_bytes=2**20)
    with LLM.from_plan(resolve(settings).plan, lambda done, total: reports.append((done, total))) as llm:
        assert (llm.model.name, llm.model.max_model_len) == ("tiny", 64)
    assert reports[-1][0] == reports[-1][1]
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", progress=False)


def test_unknown_settings_name_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("anywhere", max_modellen=5)


def test_settings_may_be_named_as_on_the_command_line(folder):
    with LLM(folder, threads=1, kv_cache="1MiB") as llm:
        assert llm.plan.config.num_threads == 1
        assert llm.plan.config.kv_cache_bytes == 2**20


@pytest.mark.parametrize("setting", [{"is_served": True, "num_replicas": 2}, {"shares_memory": True}])
def test_what_verbs_alone_decide_is_no_setting(folder, setting):
    name = next(iter(setting))
    with pytest.raises(ConfigError, match=f"there is no setting '{name}'; ") as caught:
        LLM(folder, **setting)
    assert str(caught.value).count(name) == 1  # the hint does not name it, either


def test_several_replicas_are_refused_in_the_callers_process(folder):
    with pytest.raises(ConfigError, match=r"--replicas.* processes of `moeflow serve`"):
        LLM(folder, num_replicas=2)


def test_a_plan_of_several_replicas_is_refused_before_anything_is_loaded(folder, monkeypatch):
    settings = Settings(model=str(folder), num_replicas=2, num_threads=2, kv_cache_bytes=2**20, is_served=True)
    plan = resolve(settings).plan
    assert plan.num_replicas == 2
    monkeypatch.setattr("moeflow.llm.Engine.load", None)
    with pytest.raises(ConfigError, match=r"for several engines \(--replicas\).* Give the plan to these \(--plan\)"):
        LLM.from_plan(plan)


def test_without_a_model_the_built_in_one_is_made(folder, tmp_path, monkeypatch):
    asked = []

    def make(cache_dir, on_progress):
        asked.append(cache_dir)
        return folder

    monkeypatch.setattr("moeflow.llm.make_builtin_apart", make)
    with LLM(cache_dir=tmp_path, num_threads=1, kv_cache_bytes=2**20) as llm:
        assert llm.model.path == str(folder)
    assert asked == [tmp_path]


def test_settings_may_be_written_as_on_the_command_line(folder, tmp_path):
    settings = {"num_threads": "1", "kv_cache_bytes": "1MiB", "cache_dir": str(tmp_path), "max_num_seqs": "3"}
    with LLM(str(folder), **settings) as llm:
        (result,) = llm.generate(["the quick"], GREEDY, progress=False)
    assert len(result.outputs[0].token_ids) == 8


@pytest.mark.parametrize("setting", [{"num_threads": "two"}, {"memory_bytes": "much"}, {"cache_dir": 3}])
def test_settings_that_cannot_be_meant_are_refused(folder, setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        LLM(folder, **setting)
