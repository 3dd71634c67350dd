"""What is asked of a hub: which files a repository has, and the bytes of one from some place on.

All of it by the `huggingface_hub` library, so that tokens (`HF_TOKEN`, `hf auth login`), mirrors (`HF_ENDPOINT`),
proxies and offline mode (`HF_HUB_OFFLINE`) are as in all other tools. What it raises becomes our errors, with a remedy.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from moeflow.checkpoint.hub.cache_layout import COMMIT
from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.core.brief import brief
from moeflow.core.errors import HubConnectionError, HubError

_LIBRARY: Final = "moeflow"  # as the hub gets to know its client
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FOR_NOW: Final = (403, 408, 429, 500, 502, 503, 504)  # 403: a signed address of a content network has expired
_MAX_WAIT_S: Final = 60.0
_MIRROR: Final = "If HF_ENDPOINT names a mirror, take another"
_NUM_TRIES: Final = 5  # of a small part of a file


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
    with _explained(name):
        info = HfApi(library_name=_LIBRARY).model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    if not COMMIT.fullmatch(info.sha or ""):
        raise HubError(f"{endpoint()} gives {brief(info.sha)} as the commit of {name}, which is none. {_MIRROR}")
    files = [_remote_file(sibling, name) for sibling in info.siblings or ()]
    return Repository(name, str(info.sha), {file.path: file for file in files})


@contextmanager
def open_at(repository: Repository, path: str, start: int, stop: int | None = None) -> Iterator[Pieces]:
    """Open a file of a repository to read bytes [start, stop); None: to its end.

    A server that knows no ranges sends all of it: `Pieces.start` says so. Blocks: on the network.
    Raises: HubError, also from the chunks; HubConnectionError where trying again may help.
    """
    name = repository.name
    headers = build_hf_headers(library_name=_LIBRARY) | {"Accept-Encoding": "identity"}
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    url = hf_hub_url(name.repo, path, revision=repository.commit)
    with (
        _explained(name),
        get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response,
    ):
        hf_raise_for_status(response)
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
            raise HubConnectionError(f"{endpoint()} breaks off {path} of {repository.name} again and again. Try later")
    raise AssertionError


def endpoint() -> str:
    """Return the address of the hub that is asked."""
    return str(constants.ENDPOINT)


def _start_of(response: httpx2.Response, asked: int) -> int:
    if response.status_code != httpx2.codes.PARTIAL_CONTENT:
        return 0
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else asked


def _remote_file(sibling: RepoSibling, name: ModelName) -> RemoteFile:
    path, size = sibling.rfilename, sibling.size if sibling.lfs is None else sibling.lfs.size
    checksum = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    is_inside = not PurePosixPath(path).is_absolute() and not {"..", "."} & set(path.split("/")) and "\0" not in path
    if not is_inside or not isinstance(size, int) or size < 0 or not _CHECKSUM.fullmatch(checksum or ""):
        raise HubError(
            f"{endpoint()} lists a file of {name} as {brief((path, size, checksum))}, where a path, a size and a "
            f"checksum are expected. {_MIRROR}"
        )
    return RemoteFile(path, size, str(checksum))


@contextmanager
def _explained(name: ModelName) -> Iterator[None]:
    """Raise what goes wrong with a hub as our errors."""
    try:
        yield
    except GatedRepoError:
        raise HubError(_gated(name)) from None
    except RepositoryNotFoundError:
        whose = "the token that is set may not read it" if get_token() else "it is private and no token is set"
        raise HubError(
            f"{endpoint()} has no model {name.repo}, or {whose}. Check the spelling (OWNER/NAME, as in the address of "
            "its page); for a private one set HF_TOKEN to a token that may read it"
        ) from None
    except RevisionNotFoundError:
        raise HubError(
            f"{name.repo} has no branch, tag or commit {name.revision!r}. Leave @... away for `main`"
        ) from None
    except EntryNotFoundError as error:
        raise HubError(f"a file of {name} is gone from the hub ({error}). Try again: its list may be new") from None
    except OfflineModeIsEnabled:
        raise HubError(f"HF_HUB_OFFLINE forbids to ask {endpoint()} for {name}. Unset it, and pull again") from None
    except HfHubHTTPError as error:
        raise _http_error(name, error.response) from None
    except httpx2.TransportError as error:
        raise HubConnectionError(
            f"{endpoint()} cannot be reached or broke off ({type(error).__name__}: {error}). Look at the network; "
            "HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror"
        ) from None
    except httpx2.HTTPError as error:
        raise HubError(f"{endpoint()} answers what cannot be understood ({error}). {_MIRROR}") from None


def _http_error(name: ModelName, response: httpx2.Response) -> HubError:
    status = response.status_code
    said = f"{response.url.host} answers {status} {response.reason_phrase} for {name}"
    if status == httpx2.codes.UNAUTHORIZED:
        return HubError(f"{said}: it refuses the token. Set HF_TOKEN to a valid one, or unset it for open models")
    if status in _FOR_NOW:
        wait = response.headers.get("Retry-After", "")
        return HubConnectionError(
            f"{said}. Try again in a while; a token (HF_TOKEN) raises the hub's limits, and opens what is closed",
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
