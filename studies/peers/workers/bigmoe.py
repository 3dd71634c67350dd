"""BigMoeOnEdge, llama.cpp with experts read from the file into a cache of their own, as its program serves a session.

It takes text, chooses greedily, and times by its own clock.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tokenizers import Tokenizer

from studies.peers.workers.protocol import disk_read_bytes, serve

CONTEXT, PASS = 2048, 512  # tokens


class BigMoeWorker:
    """The program in a process of its own, told what to compute by lines of JSON."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self._tokenizer = Tokenizer.from_file(wish["tokenizer"])
        self.vocab_size = self._tokenizer.get_vocab_size()
        command = [wish["program"], "--model", wish["model"], "--session", "--moe-stream"]
        command += ["--threads", str(wish["threads"]), "--ctx-size", str(CONTEXT), "--ubatch", str(PASS)]
        self._process = subprocess.Popen(
            [*command, *wish["options"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        self._told("BMOE_READY")

    @property
    def pid(self) -> int:
        """The process whose memory counts."""
        return self._process.pid

    def prefill(self, prompt: list[int]) -> float:
        """See `Worker.prefill`."""
        return float(self._generate(prompt, 1)["prefill_s"])

    def follow(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """See `Following.follow`; it chooses by itself, until it ends its answer, and as many at most."""
        before = disk_read_bytes(self.pid)
        done = self._generate(prompt, len(tokens))
        read_bytes = disk_read_bytes(self.pid) - before
        decode_read_bytes = int(done["read_mib"] * 2**20)  # of the file itself: it reads past the page cache
        return {
            "prefill_s": done["prefill_s"] * len(prompt) / done["n_prompt"],  # its own tokens may be some more or less
            "decode_s": done["tokens"] / done["tok_s"],
            "num_decoded": done["tokens"],
            "prefill_read_bytes": max(read_bytes - decode_read_bytes, 0),
            "decode_read_bytes": decode_read_bytes,
        }

    def counters(self) -> dict[str, float]:
        """It counts nothing that is compared."""
        return {}

    def _generate(self, prompt: list[int], num_new: int) -> dict[str, Any]:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        command = {"cmd": "generate", "prompt": text, "n_predict": num_new}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command, ensure_ascii=False) + "\n")  # it reads no \u beyond a byte
        self._process.stdin.flush()
        return self._told("BMOE_DONE")

    def _told(self, what: str) -> dict[str, Any]:
        """Wait for its message of that kind and return it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, values = line.partition(" ")
            if kind == "BMOE_ERROR":
                raise SystemExit(values)
            if kind == what:
                told: dict[str, Any] = json.loads(values)
                return told
        raise SystemExit(f"the program ended with {self._process.wait()}")


if __name__ == "__main__":
    serve(BigMoeWorker)
