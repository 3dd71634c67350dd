"""Answers of the server about experts, made of the routes of a few tokens: for what no small engine can show."""

from __future__ import annotations

import base64
import re
import struct
from typing import Any

from playwright.sync_api import Page, Route

TIERS = ["gpu", "ram", "slot", "disk", "other machine"]
PROMPT = ["<|user|>", "Why", " me", "?", "<|assistant|>"]
ANSWER = ["Be", "cause", "\n", " so", "."]


class Script:
    """A model of so many layers and experts, which has computed PROMPT and ANSWER but for their first and last token.

    Token number t chooses at row r the expert r + t * t and the ones after it.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None:
        self.layers = list(range(1, num_layers + 1))
        self.num_experts = num_experts
        self.top_k = top_k
        self.model = "scripted"
        self.changes: dict[str, Any] = {}  # of the answer to /stats/experts
        self.num_tokens = len(PROMPT + ANSWER)  # of the text that are there

    def chosen(self, row: int, token: int) -> list[int]:
        """Return the experts of a token."""
        return [(row + token * token + place) % self.num_experts for place in range(self.top_k)]

    def counts(self) -> list[list[int]]:
        """Return the tokens of each expert of each layer."""
        tokens = range(1, len(PROMPT + ANSWER) - 1)
        rows = [[expert for token in tokens for expert in self.chosen(row, token)] for row in range(len(self.layers))]
        return [[row.count(expert) for expert in range(self.num_experts)] for row in rows]

    def experts(self) -> dict[str, Any]:
        """Return the answer to /stats/experts."""
        counted = {"tokens": len(PROMPT + ANSWER) - 2, "counts": self.counts()}
        rows = range(len(self.layers))
        seen = {
            "model": self.model,
            "layers": self.layers,
            "num_encoder_layers": 0,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "is_counting": True,
            "counted_s": 12.0,
            "num_passes": 3,
            "total": counted,
            "last_pass": counted,
            "last_minute": counted,
            "tiers": TIERS,
            "residency": [[(row + expert) % len(TIERS) for expert in range(self.num_experts)] for row in rows],
            "hits": [[7] * self.num_experts for _ in rows],
            "misses": [[2] * self.num_experts for _ in rows],
            "read_bytes": 2**30,
            "stall_s": 1.5,
            "not_counted": "",
            "replicas": [],
        }
        return seen | self.changes

    def tokens(self) -> dict[str, Any]:
        """Return the answer to /stats/requests/{id}/tokens."""
        texts = (PROMPT + ANSWER)[: self.num_tokens]
        routes: list[str | None] = [None] * len(texts)
        for token in range(1, len(texts) - 1):
            experts = [expert for row in range(len(self.layers)) for expert in self.chosen(row, token)]
            routes[token] = base64.b64encode(struct.pack(f"<{len(experts)}H", *experts)).decode()
        tokens = [
            {"text": text, "role": "prompt" if place < len(PROMPT) else "answer", "experts": routes[place]}
            for place, text in enumerate(texts)
        ]
        return {"layers": self.layers, "num_experts": self.num_experts, "top_k": self.top_k, "tokens": tokens}

    def play(self, page: Page) -> None:
        """Have the page's questions about experts answered."""
        page.route(re.compile(r"/stats/(experts|requests/)"), self._answer)

    def _answer(self, route: Route) -> None:
        path = route.request.url.partition("?")[0]
        if path.endswith("/stats/experts"):
            route.fulfill(json=self.experts())
        elif path.endswith("/tokens"):
            route.fulfill(json=self.tokens())
        else:
            route.fulfill(json={"state": "done", "model": self.model, "experts": {"counts": self.counts()}})
