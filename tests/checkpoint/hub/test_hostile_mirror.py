"""A mirror that answers nonsense: one clear error, at once, and nothing in the cache."""

import json

import pytest

from moeflow.checkpoint.hub import blob_download, hub_client
from moeflow.checkpoint.hub.model_name import parse_model_name
from moeflow.checkpoint.hub.pull import pull
from moeflow.core.errors import HubConnectionError, HubError

NAME, COMMIT = "o/model", "c" * 40
API, FILES = "/api/models/o/model", "/o/model/resolve/"
ENTRY = {"rfilename": "config.json", "size": 2, "blobId": "a" * 40}
DEEP = b"[" * 5000 + b"]" * 5000


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """A refused download is never retried."""
    monkeypatch.setattr(blob_download._Download, "_wait", lambda *_: pytest.fail("it was tried again"))


def pulled(cache):
    return pull(parse_model_name(NAME), cache, lambda *_: None)


def num_asked(hub):
    return sum(NAME in request.path for request in hub.requests)


def listing(**changes):
    return json.dumps({"sha": COMMIT, "siblings": [ENTRY], **changes}).encode()


LISTINGS = {
    "nothing": b"",
    "a page": b"<html>log in</html>",
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "5,000 levels": DEEP,
    "5,000 levels in an object": b'{"siblings": ' + DEEP + b"}",
    "no UTF-8": b'{"sha": "\xff"}',
    "a number of many digits": b'{"sha": ' + b"9" * 10_000 + b"}",
    "NaN": b'{"sha": NaN}',
    "the same key twice": b'{"sha": 1, "sha": 2}',
    "many values": b"[" + b"0," * 1_100_000 + b"0]",
    "no commit": listing(sha=None),
    "a commit that is a list": listing(sha=[]),
    "a commit that leads elsewhere": listing(sha="../" * 13 + "x"),
    "no files": listing(siblings=None),
    "files that are an object": listing(siblings={}),
    "a file that is null": listing(siblings=[None]),
    "a file that is a list": listing(siblings=[[]]),
    "a path that is a number": listing(siblings=[ENTRY | {"rfilename": 7}]),
    "no path": listing(siblings=[ENTRY | {"rfilename": ""}]),
    "a path with half a character": listing(siblings=[ENTRY | {"rfilename": "\ud800.json"}]),
    "a path that moves the cursor": listing(siblings=[ENTRY | {"rfilename": "\x1b[2J.json"}]),
    "a long path": listing(siblings=[ENTRY | {"rfilename": "a" * 300 + ".json"}]),
    "a size that is true": listing(siblings=[ENTRY | {"size": True}]),
    "a size beyond all disks": listing(siblings=[ENTRY | {"size": 10**300}]),
    "a checksum that is a number": listing(siblings=[ENTRY | {"blobId": 10**39}]),
    "what LFS says is a text": listing(siblings=[{"rfilename": "a.gguf", "lfs": "x"}]),
    "what LFS says is empty": listing(siblings=[{"rfilename": "a.gguf", "lfs": {}}]),
    "100,000 files": listing(siblings=[ENTRY | {"rfilename": f"{number}.json"} for number in range(100_000)]),
}


@pytest.mark.parametrize("body", LISTINGS.values(), ids=LISTINGS)
def test_a_listing_that_makes_no_sense(hub, cache, body):
    hub.nonsense[API] = 200, {"Content-Type": "application/json"}, body
    with pytest.raises(HubError, match="HF_ENDPOINT") as error:
        pulled(cache)
    assert len(str(error.value)) < 600
    assert not isinstance(error.value, HubConnectionError)
    assert num_asked(hub) == 1
    assert not list(cache.rglob("*"))


@pytest.mark.parametrize("body", [b"null", b"[]", b'"x"', DEEP, b"\xff", b'{"error": [[]], "errors": [1]}'])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 418, 500])
def test_a_refusal_with_a_body_that_makes_no_sense(hub, cache, status, body):
    hub.nonsense[API] = status, {"Content-Type": "application/json"}, body
    with pytest.raises(HubError) as error:
        pulled(cache)
    assert str(status) in str(error.value) or "Check the spelling" in str(error.value)
    assert not list(cache.rglob("*"))


@pytest.mark.parametrize("status", [301, 302, 304, 307])
@pytest.mark.parametrize("start", [API, FILES])
@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://x/y", "data:,x", "http://\x7f/", "/\x7f", None])
def test_a_redirect_to_nowhere_is_not_tried_again(hub, cache, start, status, to):
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": b"1"})
    hub.nonsense[start] = status, {} if to is None else {"Location": to}, b""
    with pytest.raises(HubError) as error:
        pulled(cache)
    assert not isinstance(error.value, HubConnectionError)


def test_a_redirect_in_a_circle_ends(hub, cache):
    hub.nonsense[API] = 302, {"Location": f"{hub.url}{API}/revision/main"}, b""
    with pytest.raises(HubError, match="cannot be understood"):
        pulled(cache)


def test_an_endless_listing_ends(hub, cache, monkeypatch):
    monkeypatch.setattr(hub_client, "_MAX_LIST_BYTES", 1000)
    hub.nonsense[API] = 200, {}, b" " * 100_000
    with pytest.raises(HubError, match=r"in more than 1000 B"):
        pulled(cache)


def test_more_files_than_a_model_has_are_not_fetched(hub, cache):
    files = {f"{number}.json": b"{}" for number in range(2500)}
    hub.add(NAME, files | {"model.safetensors": b"1"})
    with pytest.raises(HubError, match="needs 2501 files, where a model has 2000 at most"):
        pulled(cache)
    assert num_asked(hub) == 1


@pytest.mark.parametrize("given", ["bytes " + "9" * 5000 + "-/1", "bytes x-y/z", "\u0661"])
def test_a_range_that_makes_no_sense(hub, cache, given):
    data = b"x" * 10
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": data})
    hub.nonsense["/o/model/"] = 206, {"Content-Range": given.encode().decode("latin-1")}, data[:0]
    repository = hub_client.list_repository(parse_model_name(NAME))
    with hub_client.open_at(repository, "model.safetensors", 3) as pieces:
        assert pieces.start == 3
        assert b"".join(pieces.chunks) == b""


@pytest.mark.parametrize("token", ["hf_\u043a\u043b\u044e\u0447", "hf_\udcff"])
def test_a_token_that_no_header_carries(hub, cache, monkeypatch, token):
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": b"1"})
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match="HF_TOKEN"):
        pulled(cache)
