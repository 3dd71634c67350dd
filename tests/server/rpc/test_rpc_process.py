"""gRPC beside HTTP in a whole server: same tokens, and an end in order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from tests.documents import ROOT
from tests.packed import pack_beside
from tests.server.live_server import eventually
from tests.server.rpc.calling import Caller
from tests.server.rpc.test_messages import FOLDER, message
from tests.server.server_process import LONG, Server
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path):
    write_tiny_mixtral(tmp_path, max_position_embeddings=4096)
    pack_beside(tmp_path)
    server = Server(tmp_path, grpc=True)
    try:
        yield server.wait_until_ready()
    finally:
        server.process.kill()
        server.process.communicate()


def test_tokens_of_http_the_documented_client_and_the_way_out(server, tmp_path):
    fields = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    request = message("CompletionRequest", prompt_token_ids=[message("TokenIds", ids=LONG["prompt"])], **fields)
    with grpc.insecure_channel(server.grpc_address) as channel:
        request.max_tokens = 40
        expected = server.post(**fields, max_tokens=40).json()["choices"][0]
        whole = Caller(channel).Complete(request).choices[0]
        assert whole.text == expected["text"]
        assert list(whole.logprobs.tokens) == expected["logprobs"]["tokens"]
        assert list(whole.logprobs.token_logprobs) == expected["logprobs"]["token_logprobs"]
        chunks = [choice for chunk in Caller(channel).StreamComplete(request) for choice in chunk.choices]
        assert "".join(chunk.text for chunk in chunks) == expected["text"]
        logprobs = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
        assert logprobs == expected["logprobs"]["token_logprobs"]

        assert documented_client(server.grpc_address, tmp_path)

        request.max_tokens = LONG["max_tokens"]
        running = Caller(channel).Complete.future(request)
        assert eventually(lambda: httpx.get(f"{server.url}/stats").json()["num_running"] == 1, 10)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: server.status("/ready") == 503, 5)
        with pytest.raises(grpc.RpcError) as refused:
            Caller(channel).Complete(request)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert running.result(60).usage.completion_tokens == LONG["max_tokens"]
    assert server.end() == 0
    assert server.said() == ""


def documented_client(address: str, folder: Path) -> str:
    """Return what the client in the guide prints, with modules that the guide's command generates."""
    guide = (ROOT / "docs" / "guides" / "grpc.md").read_text()
    (client,) = re.findall(r"```python\n(.+?)```", guide, re.DOTALL)
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{FOLDER}",
        "--python_out=.",
        "--grpc_python_out=.",
        "moeflow.proto",
    ]
    assert "python -m grpc_tools.protoc" in guide
    subprocess.run(command, cwd=folder, check=True)
    code = client.replace("127.0.0.1:50051", address)
    assert code != client
    return subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True).stdout
