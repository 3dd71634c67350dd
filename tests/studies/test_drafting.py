"""How llama.cpp's server is asked, and what its clock says: against a server that answers as it does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import gguf
import pytest

from moeflow.core.errors import EngineError
from moeflow.text.tokenizer import Tokenizer
from studies.peers import drafting, model
from studies.peers.serving import Server
from studies.speculation.prompts import Prompt
from studies.speculation.run import Answer
from tests.studies.test_peers import TINY
from tests.tiny_mixtral import write_tiny_mixtral

TIMINGS = {"predicted_n": 11, "predicted_ms": 500.0, "draft_n": 12, "draft_n_accepted": 6}


@pytest.fixture
def server():
    """A server that records its requests."""
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"tokens": list(range(11)), "timings": TIMINGS}).encode()
            self.send_response(200 if self.path == "/completion" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.handle_request)
        thread.start()
        yield Server("draft", [], http.server_address[1]), asked
        thread.join()


def test_an_answer_has_its_clock_and_its_drafts(server):
    where, asked = server
    answer = drafting._ask(where, Prompt("chat", [5, 6, 7]), 64)
    assert answer.token_ids == list(range(11))
    assert answer.seconds_per_token == pytest.approx(0.05)  # ten tokens after the first
    assert (answer.passes, answer.drafted, answer.accepted) == (4, 12, 6)
    assert asked[0]["prompt"] == [5, 6, 7]
    assert (asked[0]["n_predict"], asked[0]["temperature"], asked[0]["cache_prompt"]) == (64, 0, False)


def test_a_server_that_is_gone_is_named():
    with pytest.raises(EngineError, match="draft"):
        drafting._ask(Server("draft", [], 1), Prompt("chat", [5]), 8)


def test_rows_are_beside_each_engines_own_plain_decoding():
    def answer(seconds: float) -> Answer:
        return Answer(list(range(11)), seconds, 10, 0, 0, 0)

    found = {"one": [[answer(0.2), answer(0.1)]], "two": [[answer(0.1), answer(0.1)]]}
    plain, drafted = drafting._rows("ours", ["none", "suffix"], found)
    assert [one["speedup"] for one in plain["sets"]] == [1.0, 1.0, 1.0]
    assert [(one["set"], one["speedup"]) for one in drafted["sets"]] == [
        ("one", 2.0),
        ("two", 1.0),
        ("all", pytest.approx(1.5)),
    ]


def test_the_target_speaks_the_drafts_tokens(tmp_path):
    """The tokenizer of one GGUF file in another; the folder it is made from has one that is not understood there."""
    folder = tmp_path / model.FOLDER
    model.write_folder(folder, TINY)
    draft, target = tmp_path / "draft.gguf", tmp_path / "target.gguf"
    model.write_gguf(folder, draft, model.QUANTIZATIONS["q8_0"])
    write_tiny_mixtral(tmp_path / "mixtral", vocab_size=TINY["vocab_size"])
    model.write_gguf(tmp_path / "mixtral", target, model.QUANTIZATIONS["bf16"], tokenizer_file=draft)
    text = "Gr\u00f6\u00dfe: 3 ok\n"
    assert Tokenizer.load(target).encode(text) == Tokenizer.load(draft).encode(text)
    fields = [gguf.GGUFReader(file).fields for file in (draft, target)]
    names = [{name for name in each if name.startswith("tokenizer.")} for each in fields]
    assert names[0] == names[1]
