"""A batch job during a fault: each line must be answered once, with the text of calm times."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from moeflow.core.errors import EngineError

_LOOK_S = 0.5
_OVER = ("completed", "failed", "expired", "cancelled")


async def has_batches(client: httpx.AsyncClient) -> bool:
    """Return whether the server takes batch jobs."""
    return (await client.get("/v1/batches")).is_success


class BatchJob:
    """One job of the server."""

    def __init__(self, client: httpx.AsyncClient, num_lines: int, num_tokens: int) -> None:
        self._client = client
        self.num_lines = num_lines
        bodies = [
            {"prompt": f"line {number} begins", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
            for number in range(num_lines)
        ]
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number, body in enumerate(bodies)
        ]
        self._text = "\n".join(json.dumps(line) for line in lines)

    async def begin(self) -> None:
        """Upload the lines and start the job."""
        files = {"file": ("chaos.jsonl", self._text.encode())}
        self._files = [await self._id_of(self._client.post("/v1/files", files=files, data={"purpose": "batch"}))]
        body = {"input_file_id": self._files[0], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = await self._id_of(self._client.post("/v1/batches", json=body))

    async def texts(self, timeout_s: float) -> dict[str, str]:
        """Wait for the end, delete the job's files, and return the texts. Raises: EngineError for a lost line."""
        try:
            async with asyncio.timeout(timeout_s):
                while (batch := await self._batch())["status"] not in _OVER:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            counts = batch["request_counts"]
            raise EngineError(f"the batch job has not ended after {timeout_s:.0f} s: {counts}") from None
        lines = [json.loads(line) for file in self._results(batch) for line in await self._lines(file)]
        for file in self._files:
            await self._client.delete(f"/v1/files/{file}")
        ids = [line["custom_id"] for line in lines]
        if len(ids) != len(set(ids)):
            raise EngineError("the batch job has answered a line twice")
        failed = [line for line in lines if line["response"] is None or line["response"]["status_code"] != 200]
        if failed or len(ids) != self.num_lines:
            first = f": {failed[0]}" if failed else ""
            raise EngineError(f"{len(ids) - len(failed)} of {self.num_lines} lines of the batch job{first}")
        return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}

    async def _batch(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = (await self._client.get(f"/v1/batches/{self._id}")).json()
        except httpx.HTTPError as error:
            return {"status": "unknown", "request_counts": str(error)}
        return found

    def _results(self, batch: dict[str, Any]) -> list[str]:
        found = [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
        self._files += found
        return found

    async def _lines(self, file: str) -> list[str]:
        return (await self._client.get(f"/v1/files/{file}/content")).text.splitlines()

    async def _id_of(self, request: Any) -> str:
        response: httpx.Response = await request
        if response.is_error:
            raise EngineError(f"the server refuses a batch job: {response.status_code} {response.text[:200]}")
        return str(response.json()["id"])
