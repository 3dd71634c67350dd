"""How a measured engine is driven: one JSON line in, one JSON line out. Standard library only, as peers run it.

Every engine is timed the same way: the prompt is not part of a decode, the clock runs in the engine's own
process, and what the rest of the machine computed meanwhile is reported beside each figure.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FIRST_ORDINARY_TOKEN = 3  # those before it pad, begin and end texts
FIRST_PROMPT = 32


class Following(Protocol):
    """What an engine must do besides to be measured on text, where experts come from disk."""

    def follow(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """Compute a prompt, then each of its known next tokens alone; return the time of each part.

        An engine that chooses by itself continues greedily and returns its choices: {prefill_s, decode_s, tokens,
        prefill_read_bytes, decode_read_bytes}, the latter two what came from disk meanwhile.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Return what the engine counted so far."""
        ...


class Worker(Protocol):
    """An engine with the model loaded. Token ids in, seconds out."""

    vocab_size: int

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Compute the prompts, then time so many passes of one token for each of them."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Time a prompt up to its logits or first token, from an empty cache."""
        ...

    def logprobs(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """Return the `count` likeliest next tokens with their log-probabilities, likeliest first."""
        ...


class Scoring(Protocol):
    """What an engine must do besides for its perplexity to be known."""

    def text_logprobs(self, text: list[int]) -> tuple[list[float], list[int]]:
        """Return the log-probability of each of a text's tokens but the first, after those before it, and the
        likeliest token at each of these places."""
        ...


def serve(load: Callable[[dict[str, Any]], Worker]) -> None:
    """Load as the program's argument says, then answer commands until the input ends.

    The argument is a JSON object; `started` in it is when the parent started this process, by the system's
    monotonic clock.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print goes to the log
    wish = json.loads(sys.argv[1])
    rng = random.Random(wish["seed"])

    def answer(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    start, taken = time.monotonic(), _foreign_s()
    worker = load(wish)
    load_s = time.monotonic() - start

    def random_prompt(length: int) -> list[int]:
        return [rng.randrange(FIRST_ORDINARY_TOKEN, worker.vocab_size) for _ in range(length)]

    worker.prefill(random_prompt(FIRST_PROMPT))
    now = time.monotonic()
    process = getattr(worker, "pid", None) or os.getpid()  # an engine may be a process of its own
    memory = memory_mib(process)
    answer(
        {
            "load_s": load_s,
            "first_token_s": now - start,
            "start_s": now - wish["started"],
            "resident_mib": memory["VmRSS"],
            "foreign_cpu": max(_foreign_s() - taken, 0.0) / (now - start),
        }
    )
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("do")
        if kind == "decode":
            prompts = [random_prompt(command["prompt_len"]) for _ in range(command["batch_size"])]
            answer(_watched(partial(worker.decode, prompts, command["new_tokens"])))
        elif kind == "prefill":
            answer(_watched(partial(worker.prefill, random_prompt(command["prompt_len"]))))
        elif kind == "follow":
            answer(worker.follow(command["prompt"], command["tokens"]))
        elif kind == "logprobs":
            answer({"logprobs": worker.logprobs(command["prompt"], command["count"])})
        elif kind == "text_logprobs":
            logprobs, tokens = worker.text_logprobs(command["text"])
            answer({"logprobs": logprobs, "likeliest": tokens})
        elif kind == "memory":
            answer({"peak_mib": memory_mib(process)["VmHWM"]})
        elif kind == "counters":
            answer(worker.counters())


def likeliest(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """Return the `count` highest of the logits as (token, log-probability), highest first."""
    top = max(logits)
    total = top + math.log(sum(math.exp(logit - top) for logit in logits))
    tokens = heapq.nlargest(count, range(len(logits)), key=logits.__getitem__)
    return [(token, logits[token] - total) for token in tokens]


def memory_mib(pid: int) -> dict[str, float]:
    """Return what a process holds now (VmRSS) and held at most (VmHWM), mapped files included."""
    with open(f"/proc/{pid}/status") as lines:
        pairs = (line.split(":", 1) for line in lines)
        return {name: int(value.split()[0]) / 1024 for name, value in pairs if name in ("VmRSS", "VmHWM")}


class FollowClock:
    """Times a prompt and the tokens after it, in this process, and counts the bytes read from disk meanwhile."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []
        self.mark()

    def mark(self) -> None:
        """Note that the prompt is computed, or all tokens are."""
        self._marks.append((time.perf_counter(), disk_read_bytes(os.getpid())))

    def told(self, tokens: list[int]) -> dict[str, Any]:
        """Return what `Following.follow` says, all tokens being computed."""
        self.mark()
        (begin_s, begin), (prefilled_s, prefilled), (end_s, end) = self._marks
        return {
            "prefill_s": prefilled_s - begin_s,
            "decode_s": end_s - prefilled_s,
            "tokens": tokens,
            "prefill_read_bytes": prefilled - begin,
            "decode_read_bytes": end - prefilled,
        }


def disk_read_bytes(pid: int) -> int:
    """Return what a process has had read from disk so far, pages of mapped files included."""
    with open(f"/proc/{pid}/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _watched(timed: Callable[[], float]) -> dict[str, float]:
    """Return the seconds, and how much of a core others took from start to end, time stolen by the host included."""
    start, taken = time.monotonic(), _foreign_s()
    seconds = timed()
    return {"seconds": seconds, "foreign_cpu": max(_foreign_s() - taken, 0.0) / (time.monotonic() - start)}


def _foreign_s() -> float:
    """Return the processor seconds that others have taken since the machine started."""
    with open("/proc/stat") as lines:
        user, nice, system, _idle, _iowait, *interrupts_and_stolen = map(int, next(lines).split()[1:9])
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy_s = (user + nice + system + sum(interrupts_and_stolen)) / TICKS_PER_S
    return busy_s - sum(usage.ru_utime + usage.ru_stime for usage in own)
