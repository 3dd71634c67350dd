"""Records in the tools' own format, with figures for easy arithmetic."""

from __future__ import annotations

from typing import Any

HEAD: dict[str, Any] = {
    "time": "2026-01-31T12:00:00+00:00",
    "command": "moeflow bench all /home/somebody/models/mine --fast",
    "seed": 0,
    "commit": "1a2b3c4",
    "machine": {"cpu": "Abacus", "cores": 2, "memory_gib": 24, "system": "Linux 6", "threads": 2},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}


def engine_record(**changes: Any) -> dict[str, Any]:
    return {
        **HEAD,
        "kind": "engine",
        "model": {"name": "mine"},
        "weight_format": "float32",
        "device": "cpu",
        "weight_bytes": 2**30,
        "kv_cache_bytes": 2**20,
        "load_s": 1.5,
        "memory": {"before_bytes": 2**28, "loaded_bytes": 2**30, "peak_bytes": 2**31},
        "read_bytes_per_s": [1e9, 2e9, 3e9],
        "fp32_flops_per_s": [6e9],
        "cases": [
            {
                "name": "decode, batch 4",
                "batch_size": 4,
                "prompt_len": 32,
                "new_tokens": 25,
                "num_tokens": 100,
                "num_bytes": 1e9,
                "num_flops": 3e9,
                "tokens_per_s": [50.0, 40.0, 60.0],
            }
        ],
        "skipped": {"prefill 2048": "too long"},
        "is_complete": True,
        **changes,
    }


def serve_record(system: str, *, rate: float, seed: int, requests_per_s: float) -> dict[str, Any]:
    times = {"avg": 1.5, "min": 0.5, "max": 2.5, "p50": 1.5, "p99": 2.5}
    return {
        **HEAD,
        "kind": "serve",
        "system": system,
        "model": "mine",
        "weight_format": "float32",
        "device": "cpu",
        "rate": rate,
        "workload": {"seed": seed},
        "summary": {
            "num_requests": 2,
            "num_failed": 0,
            "requests_per_s": requests_per_s,
            "tokens_per_s": 10 * requests_per_s,
            **{f"{name}_{key}_s": value for name in ("latency", "first_token") for key, value in times.items()},
        },
        "errors": {},
        "requests": {"prompt": [8, 9], "new": [3, 4], "latency_s": [0.5, 2.5]},
    }


def quality_record() -> dict[str, Any]:
    return {
        **HEAD,
        "kind": "quality",
        "model": "mine",
        "text": "bundled",
        "reference_format": "float32",
        "reference_kv_dtype": "float32",
        "weight_format": "int8",
        "kv_dtype": "float32",
        "num_tokens": 1000,
        "reference_perplexity": 10.0,
        "perplexity": 10.1,
        "change_percent": 1.0,
        "change_error_percent": 0.2,
        "same_likeliest_share": 0.975,
        "same_greedy_share": 0.8,
        "weight_bytes": 3 << 20,
    }


def versus_record() -> dict[str, Any]:
    return {
        **HEAD,
        "kind": "engine_vs_transformers",
        "model": "mine",
        "weight_format": "float32",
        "cases": [
            {
                "name": "decode, batch 1",
                "tokens_per_s": {"moeflow": [10.0, 20.0, 30.0], "transformers": [10.0, 10.0, 10.0]},
                "equal_answers": "3/3",
            }
        ],
    }


def family_record(family: str, at_1: float, at_32: float) -> dict[str, Any]:
    """A random model's decode rates, transformers' always 10."""
    cases = [
        {
            "name": f"decode, batch {size}",
            "batch_size": size,
            "prompt_len": 32,
            "new_tokens": 64,
            "tokens_per_s": {"moeflow": [rate], "transformers": [10.0]},
            "equal_answers": "1/2",
        }
        for size, rate in ((1, at_1), (32, at_32))
    ]
    command = f"python -m studies.engine_vs_transformers {family} --dtype bfloat16"
    return {**versus_record(), "command": command, "model": family, "weight_format": "bfloat16", "cases": cases}


def job_record(system: str, num_new: int, **changes: Any) -> dict[str, Any]:
    return {
        **HEAD,
        "kind": "batch",
        "measured": "job",
        "model": "mine",
        "weight_format": "float32",
        "system": system,
        "kv_capacity_tokens": 1024,
        "max_num_seqs": 8,
        "workload": {
            "name": "mtbench",
            "num_requests": 80,
            "num_new": num_new,
            "mean_prompt": 70.0,
            "longest_prompt": 372,
            "seed": 0,
        },
        "summary": {"tokens_per_s": 100.0 if system == "padded" else 300.0},
        **changes,
    }


def beside_record(seed: int, **changes: Any) -> dict[str, Any]:
    """Four requests, the fourth of each run slower than the others; twice as slow beside a job."""
    alone = {"first_token_s": [0.1] * 4, "per_token_s": [0.01, 0.01, 0.01, 0.02 + 0.01 * seed]}
    return {
        **job_record("variable length", 50),
        "measured": "beside",
        "command": f"moeflow bench batch --interactive-rate 0.25 --seed {seed} --out all.jsonl",
        "rate": 0.25,
        "kv_capacity_tokens": 4096 + 16 * seed,  # what memory was free
        "interactive_alone": alone,
        "interactive_beside_job": {key: [2 * value for value in values] for key, values in alone.items()},
        "job_alone": {"tokens": 2000, "seconds": 10.0},
        "job_beside_interactive": {"tokens": 500 + 900 * seed, "seconds": 5.0 + 5.0 * seed},
        **changes,
    }


def accuracy_record(*errors: float) -> dict[str, Any]:
    """A predicted speed for each error; the measured speed is 100."""
    rows = [
        {
            "name": f"decode {number}",
            "unit": "tokens/s",
            "predicted": 100 * (1 + it),
            "measured": 100.0,
            "informed": None,
        }
        for number, it in enumerate(errors)
    ]
    memory = {"name": "peak memory", "unit": "bytes", "predicted": 2**30, "measured": 2**30, "informed": None}
    return {**HEAD, "kind": "plan_accuracy", "model": "mine", "cases": {"--quantize int8": [*rows, memory]}}


def grid_record(**rates: list[float]) -> dict[str, Any]:
    return {
        **HEAD,
        "kind": "policy_grid",
        "model": "mine",
        "weight_format": "int8",
        "device": "auto",
        "memory_bytes": 2**30,
        "job": {"num_requests": 8, "prompt_len": 16, "gen_len": 4},
        "planned": {"batch_size": 4, "micro_batch": 4, "pipeline": None},
        "predicted_tokens_per_s": 55.0,
        "tokens_per_s": {name.replace("_", " "): values for name, values in rates.items()},
    }


def memory_record(*shares: float) -> dict[str, Any]:
    runs = [
        {
            "weight_format": "int8",
            "limit_bytes": 2**30,
            "peak_bytes": int(share * 2**30),
            "charged_bytes": None,
            "at_end": "",
        }
        for share in shares
    ]
    about = {"model": "mine", "verb": "serve", "is_enforced": False}
    return {**HEAD, "kind": "memory_budget", **about, "runs": runs}


def cache_record() -> dict[str, Any]:
    """Alternating steps of 10 and 11 ms."""
    row = {
        "num_slots": 8,
        "num_experts": 8,
        "batch_size": 1,
        "resident_s": [0.01, 0.01],
        "slots_s": [0.011, 0.011],
        "stall_s": 0.002,
        "hit_rate": 1.0,
    }
    about = {"model": "mine", "weight_format": "int8", "policy": "lfru", "predictor": "none"}
    return {**HEAD, "kind": "expert_cache_overhead", **about, "rows": [row]}


def trace_record() -> dict[str, Any]:
    times = {"traced_s": [0.0202, 0.0202], "plain_s": [0.02, 0.02]}
    about = {"model": "mine", "weight_format": "int8", "memory_bytes": 2**30, "hit_rate": 0.5}
    return {**HEAD, "kind": "trace_overhead", **about, **times}


def forms_record() -> dict[str, Any]:
    """Three rounds, in the median 10 ms a step and 11 with a schema."""
    about = {"model": "mine", "weight_format": "int8", "vocab_size": 258, "num_tokens": 64}
    rows = [{"batch_size": 8, "plain_s": [0.01, 0.008, 0.02], "formed_s": [0.011, 0.01, 0.012]}]
    return {**HEAD, "kind": "answer_forms", **about, "rows": rows}


def streaming_record(**changes: Any) -> dict[str, Any]:
    """A quarter, and all."""
    frames = {"frames_per_s": 50.0, "median_ms": 16.7, "p99_ms": 33.4, "worst_ms": 60.0, "late_share": 0.25}
    work = {"seconds": 12.5, "busy_share": 0.28, "script_share": 0.05, "style_share": 0.02, "layout_share": 0.03}
    quarter = {"name": "quarter 1", **frames, "long_tasks_ms": [70.0, 60.0], **work, "num_nodes": 1200.0}
    return {
        **HEAD,
        "kind": "page_streaming",
        "machine": {**HEAD["machine"], "threads": None},
        "browser": "150.0",
        "num_tokens": 10_000,
        "rate": 200.0,
        "is_phone": False,
        "quarters": [quarter, {**quarter, "name": "all"}],
        **changes,
    }


def load_record(**changes: Any) -> dict[str, Any]:
    """Two loads of a phone, and one of a desktop computer."""
    run = {
        "score": 92.0,
        "first_contentful_paint_s": 1.0,
        "largest_contentful_paint_s": 2.0,
        "speed_index_s": 3.0,
        "total_blocking_time_s": 0.0,
        "layout_shift": 0.0,
    }
    other = {**run, "score": 96.0, "first_contentful_paint_s": 1.5}
    return {
        **HEAD,
        "kind": "page_load",
        "machine": {**HEAD["machine"], "threads": None},
        "browser": "150.0",
        "lighthouse": "13.5.0",
        "devices": [{"name": "phone", "runs": [run, other]}, {"name": "desktop", "runs": [run]}],
        **changes,
    }


def parallel_record(**changes: Any) -> dict[str, Any]:
    """Two layouts on two ranks, in two repeats; times are whole milliseconds."""
    ms = 1e-3
    padded = [[[1, 2, 10, 1], [1, 2, 4, 3]], [[1, 2, 6, 1], [1, 2, 4, 3]]]
    return {
        **HEAD,
        "kind": "parallel",
        "layer": {
            "num_ranks": 2,
            "num_experts": 8,
            "top_k": 1,
            "hidden": 768,
            "width": 3072,
            "is_gated": False,
            "weights": "bfloat16",
        },
        "num_tokens": [1024, 1024],
        "router_skew": 0.6,
        "num_experts_skew": 1,
        "capacity_factor": 1.25,
        "sections": ["route", "dispatch", "experts", "combine"],
        "num_cores": 2,
        "predicted_on": "measured 2026-01-31",
        "layouts": {
            "capacity-dropless": {
                "seconds": [[[s * ms for s in rank] for rank in repeat] for repeat in padded],
                "wall_s": [0.04, 0.05],
                "sent_bytes": [1024, 1024],
                "dropped_share": 0.0,
                "is_equal": True,
                "error": 0.0,
                "predicted_s": [[0.001, 0.002, 0.008, 0.001], [0.001, 0.002, 0.004, 0.003]],
            },
            "sliced": {
                "seconds": [[[0.001, 0.001, 0.004, 0.002]] * 2] * 2,
                "wall_s": [0.03, 0.03],
                "sent_bytes": [2048, 4096],
                "dropped_share": 0.0,
                "is_equal": False,
                "error": 2e-7,
                "predicted_s": [[0.001, 0.001, 0.001, 0.001], [0.001, 0.001, 0.004, 0.002]],
            },
        },
        **changes,
    }


def speculation_record(speedup: float, **changes: Any) -> dict[str, Any]:
    """Of one speculator, and of trees and chains of two tokens; all in one set of prompts."""

    def arm(name: str, size: int | None, *, is_chain: bool = False, accepted: int = 6) -> dict[str, Any]:
        one = {
            "set": "chat",
            "num_answers": 4,
            "plain_tokens_per_s": 10.0,
            "tokens_per_s": 10.0 * speedup,
            "speedup": speedup,
            "speedup_low": speedup - 0.25,
            "speedup_median": speedup,
            "speedup_high": speedup + 0.25,
            "passes": 20,
            "drafting_passes": 10,
            "drafted": 12,
            "accepted": accepted,
            "tokens_per_pass": 1.3,
        }
        counts = {"speculator": "suffix", "drafting_s": 0.5, "drafted": [8, 4, 0], "accepted": [5, 1, 0]}
        return {
            "name": name,
            "speculators": ["suffix"],
            "size": size,
            "is_chain": is_chain,
            "sets": [one],
            "acceptance": [counts],
            "trees": [5, 4, 1],
        }

    return {
        **HEAD,
        "kind": "speculation",
        "model": "mine",
        "weight_format": "float32",
        "speculators": ["suffix"],
        "temperature": 0.0,
        "prompts": "bundled",
        "arms": [arm("suffix", None), arm("tree of 2", 2), arm("chain of 2", 2, is_chain=True, accepted=4)],
        **changes,
    }


def drafting_record(speedup: float) -> dict[str, Any]:
    """Of drafts, compared with llama.cpp's."""
    sets = speculation_record(speedup)["arms"][0]["sets"]
    both = [*sets, {**sets[0], "set": "all"}]
    return {
        **HEAD,
        "kind": "speculation_peers",
        "format": "int8",
        "target": "big.gguf",
        "draft": "small.gguf",
        "new_tokens": 64,
        "num_prompts": 4,
        "rounds": 2,
        "num_same": 7,
        "peer_versions": {"llama-cpp-python": "0.3.36"},
        "rows": [
            {"engine": "moeflow", "drafts": "none", "sets": both},
            {"engine": "moeflow", "drafts": "suffix", "sets": both},
            {"engine": "llama.cpp", "drafts": "none", "sets": both},
        ],
    }
