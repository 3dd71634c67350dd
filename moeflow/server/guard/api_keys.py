"""The keys of one server, by digest, and the use of each key's limits.

Tokens count as they are computed. So concurrent requests can exceed a limit; the next ones then wait longer.
"""

from __future__ import annotations

from moeflow.server.config import ServerConfig
from moeflow.server.guard.allowance import Allowance
from moeflow.server.guard.key_file import SINGLE, ApiKey, digest_of, read_key_file
from moeflow.server.request_log import RequestRecord


class Account:
    """The limits of one key, and its requests under way."""

    def __init__(self, key: ApiKey) -> None:
        self.name = key.name
        self._requests = Allowance(key.requests_per_minute) if key.requests_per_minute else None
        self._tokens = Allowance(key.tokens_per_minute) if key.tokens_per_minute else None
        self._open: set[RequestRecord] = set()

    @property
    def is_limited(self) -> bool:
        """Whether it has any limit."""
        return self._requests is not None or self._tokens is not None

    def begin(self, record: RequestRecord) -> float:
        """Count a request in and return 0, or return after how many seconds it may come again."""
        wait_s = max(
            self._requests.wait_s() if self._requests else 0.0,
            self._tokens.wait_s(sum(map(num_tokens, self._open))) if self._tokens else 0.0,
        )
        if wait_s == 0.0:
            self._open.add(record)
            if self._requests:
                self._requests.take(1)
        return wait_s

    def end(self, record: RequestRecord) -> None:
        """Count a request out."""
        if self._tokens and record in self._open:
            self._tokens.take(num_tokens(record))
        self._open.discard(record)


class ApiKeys:
    """Who may use a server that needs a key: `--api-key` and those of a file, which can be read again."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises: ConfigError if there is something wrong with the file."""
        self._config = config
        self._accounts: dict[bytes, Account] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again; limits begin anew. Raises: ConfigError; the keys then stay as they are."""
        keys = [] if self._config.api_keys_file is None else read_key_file(self._config.api_keys_file)
        if self._config.api_key is not None:
            keys.append(ApiKey(SINGLE, digest_of(self._config.api_key.encode())))
        self._accounts = {key.digest: Account(key) for key in keys}

    @property
    def names(self) -> list[str]:
        """The name of each key."""
        return [account.name for account in self._accounts.values()]

    def find(self, key: bytes) -> Account | None:
        """Return the account of a key; the lookup compares digests alone, so its time reveals nothing of a key."""
        return self._accounts.get(digest_of(key))


def num_tokens(record: RequestRecord) -> int:
    """Return how many tokens a request has used so far."""
    return 0 if record.work is None else record.work.num_prompt_tokens + record.work.num_completion_tokens
