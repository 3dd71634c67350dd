"""Requests to a hub: the files of a repository, and the bytes of a file from an offset.

Uses the `huggingface_hub` library: tokens (`HF_TOKEN`, `hf auth login`), mirrors (`HF_ENDPOINT`), proxies and offline
mode (`HF_HUB_OFFLINE`) work as in other tools. Its exceptions become errors of this package with a remedy.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, get_session, get_token, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils._headers import build_hf_headers

from moeflow.checkpoint.hub.cache_layout import COMMIT
from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.core.errors import HubConnectionError, HubError
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.core.units import MIB, format_bytes
from moeflow.core.untrusted import UnreadableError, parse_json

_LIBRARY: Final = "moeflow"  # as the hub gets to know its client
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FOR_NOW: Final = (403, 408, 429, 500, 502, 503, 504)  # 403: a signed address of a content network has expired
_MAX_WAIT_S: Final = 60.0
_IN_REDIRECT: Final = "Invalid URL in location header"  # as httpx2 says it
_WRONG_TOKEN: Final = "Invalid credentials in Authorization header"  # as the hub says it
_MIRROR: Final = "If HF_ENDPOINT names a mirror, take another"
_NUM_TRIES: Final = 5  # of a small part of a file
_MAX_LIST_BYTES: Final = 32 * MIB
_MAX_FILES: Final = 20_000  # of a repository
_MAX_FILE_BYTES: Final = 1 << 60
_MAX_NAME_BYTES: Final = 200  # of a file or folder, which gets a longer name while it is written


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. `checksum` is the SHA-256 of what LFS keeps, else git's SHA-1 of a blob; both in hex."""

    path: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of a repository at a commit."""

    name: ModelName
    commit: str
    files: dict[str, RemoteFile]  # by their paths


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes of a file, as they arrive. `start`: where in the file they begin."""

    start: int
    chunks: Iterator[bytes]


OpenAt = Callable[[int], AbstractContextManager[Pieces]]  # a file's bytes from a place on


def list_repository(name: ModelName) -> Repository:
    """Return a repository's files at the commit that the name's revision is now.

    Blocks: on the network. Raises: HubError.
    """
    url = f"{endpoint()}/api/models/{name.repo}/revision/{quote(name.revision, safe='')}"
    with _get(name, url, {}, constants.HF_HUB_ETAG_TIMEOUT, params={"blobs": "true"}) as response:
        listing = _read_listing(response, name)
    commit, entries = listing.get("sha"), listing.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise HubError(f"{endpoint()} gives {truncated_repr(commit)} as the commit of {name}, which is none. {_MIRROR}")
    if not isinstance(entries, list) or len(entries) > _MAX_FILES:
        found = f"{len(entries)} files" if isinstance(entries, list) else truncated_repr(entries)
        raise HubError(
            f"{endpoint()} lists {found} of {name}, where a list of at most {_MAX_FILES} is expected. {_MIRROR}"
        )
    files = [_remote_file(entry, name) for entry in entries]
    return Repository(name, commit, {file.path: file for file in files})


@contextmanager
def open_at(repository: Repository, path: str, start: int, stop: int | None = None) -> Iterator[Pieces]:
    """Open a file of a repository to read bytes [start, stop); None: to its end.

    A server that knows no ranges sends all of it: `Pieces.start` says so. Blocks: on the network.
    Raises: HubError, also from the chunks; HubConnectionError where trying again may help.
    """
    name = repository.name
    headers = {"Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    url = hf_hub_url(name.repo, path, revision=repository.commit)
    with _get(name, url, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        yield Pieces(_start_of(response, start), response.iter_raw())


def read_range(repository: Repository, path: str, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file, or fewer where it ends before.

    Blocks: on the network. Raises: HubError.
    """
    stop = min(stop, repository.files[path].num_bytes)
    data = bytearray()
    for failures in itertools.count(1):
        try:
            with open_at(repository, path, start + len(data), stop) as pieces:
                if pieces.start != start + len(data):
                    raise HubError(f"{endpoint()} sends no parts of files, which is needed to read headers. {_MIRROR}")
                for chunk in pieces.chunks:
                    data += chunk
                    if len(data) >= stop - start:  # a server that knows no ranges would go on to the file's end
                        break
        except HubConnectionError:
            if failures == _NUM_TRIES:
                raise
        if len(data) >= stop - start:
            return bytes(data[: stop - start])
        if failures == _NUM_TRIES:
            raise HubConnectionError(
                f"{endpoint()} repeatedly interrupts the download of {path} of {repository.name}. Retry later"
            )
    raise AssertionError


def endpoint() -> str:
    """Return the address of the hub that is asked."""
    return str(constants.ENDPOINT)


def _start_of(response: httpx2.Response, asked: int) -> int:
    if response.status_code != httpx2.codes.PARTIAL_CONTENT:
        return 0
    match = re.match(r"bytes (\d{1,18})-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else asked


@contextmanager
def _get(
    name: ModelName, url: str, headers: dict[str, str], timeout_s: float, params: dict[str, str] | None = None
) -> Iterator[httpx2.Response]:
    """Yield a hub's answer, if it is a good one, to be read within the block. Raises: HubError."""
    with _explained(name):
        headers = build_hf_headers(library_name=_LIBRARY) | headers
        with get_session().stream("GET", url, headers=headers, params=params, timeout=timeout_s) as response:
            _check_status(response, name)
            yield response


def _read_listing(response: httpx2.Response, name: ModelName) -> dict[str, Any]:
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) > _MAX_LIST_BYTES:
            raise HubError(f"{endpoint()} lists {name} in more than {format_bytes(_MAX_LIST_BYTES)}. {_MIRROR}")
    try:
        listing = parse_json(bytes(data))
    except UnreadableError as error:
        raise HubError(f"{endpoint()} sends a list of {name} that is not JSON ({error}). {_MIRROR}") from None
    if not isinstance(listing, dict):
        raise HubError(
            f"{endpoint()} lists {name} as {truncated_repr(listing)}, where an object is expected. {_MIRROR}"
        )
    return listing


def _remote_file(entry: Any, name: ModelName) -> RemoteFile:
    """Return what an entry of a listing says of a file. Raises: HubError unless all of it can be."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    lfs = fields.get("lfs")
    path, size, checksum = (
        (fields.get("rfilename"), lfs.get("size"), lfs.get("sha256"))
        if isinstance(lfs, dict)
        else (fields.get("rfilename"), fields.get("size"), fields.get("blobId"))
    )
    if (
        not _is_inside(path)
        or type(size) is not int
        or not 0 <= size <= _MAX_FILE_BYTES
        or not isinstance(checksum, str)
        or not _CHECKSUM.fullmatch(checksum)
    ):
        raise HubError(
            f"{endpoint()} lists a file of {name} as {truncated_repr((path, size, checksum))}, where a path, a "
            "size and a "
            f"checksum are expected. {_MIRROR}"
        )
    return RemoteFile(str(path), int(size), checksum)


def _is_inside(path: Any) -> bool:
    """Return whether a path leads into the folder that it is put into, by names that file systems have."""
    if not isinstance(path, str) or not path.isprintable() or PurePosixPath(path).is_absolute():
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= _MAX_NAME_BYTES for part in path.split("/"))


@contextmanager
def _explained(name: ModelName) -> Iterator[None]:
    """Raise what goes wrong with a hub as our errors."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise HubError(f"HF_HUB_OFFLINE forbids to ask {endpoint()} for {name}. Unset it, and pull again") from None
    except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.InvalidURL, UnicodeError) as error:
        raise _no_address(name, error) from None
    except httpx2.TransportError as error:
        if _IN_REDIRECT in str(error):
            raise _no_address(name, error) from None
        raise HubConnectionError(
            f"{endpoint()} cannot be reached or broke off ({type(error).__name__}: {truncated(str(error))}). "
            "Look at the "
            "network; HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror"
        ) from None
    except httpx2.HTTPError as error:
        raise HubError(f"{endpoint()} answers what cannot be understood ({truncated(str(error))}). {_MIRROR}") from None


def _no_address(name: ModelName, error: Exception) -> HubError:
    return HubError(
        f"{endpoint()} cannot be asked for {name}, or leads to an address that cannot ({truncated(str(error))}). "
        "Look at HF_ENDPOINT and HF_TOKEN"
    )


def _check_status(response: httpx2.Response, name: ModelName) -> None:
    """Raise HubError for a refusal, by its headers; its body may be anything and is not read."""
    if response.is_success:
        return
    code, said = (response.headers.get(header, "") for header in ("X-Error-Code", "X-Error-Message"))
    is_unknown = response.status_code == httpx2.codes.UNAUTHORIZED and said != _WRONG_TOKEN
    if code == "GatedRepo":
        raise HubError(_gated(name))
    if code == "RevisionNotFound":
        raise HubError(f"{name.repo} has no branch, tag or commit {name.revision!r}. Omit @... for `main`")
    if code == "EntryNotFound":
        raise HubError(f"a file of {name} is gone from the hub ({response.url.path}). Try again: its list may be new")
    if code == "RepoNotFound" or (is_unknown and str(response.url).startswith(endpoint())):
        whose = "the token that is set may not read it" if get_token() else "it is private and no token is set"
        raise HubError(
            f"{endpoint()} has no model {name.repo}, or {whose}. Check the spelling (OWNER/NAME, as in the address of "
            "its page); for a private one set HF_TOKEN to a token that may read it"
        )
    raise _http_error(name, response)


def _http_error(name: ModelName, response: httpx2.Response) -> HubError:
    status = response.status_code
    said = f"{response.url.host} answers {status} {response.reason_phrase} for {name}"
    if status == httpx2.codes.UNAUTHORIZED:
        return HubError(f"{said}: it refuses the token. Set HF_TOKEN to a valid one, or unset it for open models")
    if status in _FOR_NOW:
        wait = response.headers.get("Retry-After", "")
        return HubConnectionError(
            f"{said}. Retry later; a token (HF_TOKEN) raises the hub's limits and gives access to gated models",
            wait_s=min(float(wait), _MAX_WAIT_S) if wait.isdecimal() else 0.0,
        )
    return HubError(f"{said}. {_MIRROR}")


def _gated(name: ModelName) -> str:
    page = f"{endpoint()}/{name.repo}"
    if get_token() is None:
        return (
            f"{name.repo} is gated: its owner wants conditions accepted first. Open {page}, log in and accept them; "
            f"then set HF_TOKEN to a token of your account ({endpoint()}/settings/tokens), or run `hf auth login`"
        )
    return (
        f"{name.repo} is gated, and the account of the token that is set has no access yet. Open {page} with that "
        "account and accept the conditions; some owners then take a while to agree"
    )
