"""Real proxies in front of a server, started with the examples of deploy/ on loopback ports."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.documents import ROOT
from tests.server.live_server import eventually

TLS = ROOT / "tests" / "data" / "tls"
SBIN = "/usr/sbin:/usr/local/sbin"  # which not every user has on the path
NGINX = shutil.which("nginx") or shutil.which("nginx", path=SBIN)
CADDY = shutil.which("caddy")


@contextlib.contextmanager
def behind(proxy: str, server_port: int, folder: Path) -> Iterator[str]:
    """Run a proxy in front of a server and yield the outside address."""
    port = _free_port()
    command = (_nginx if proxy == "nginx" else _caddy)(port, server_port, folder)
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        assert eventually(lambda: process.poll() is not None or _listens(port), 20), "it does not listen"
        assert process.poll() is None, (folder / "log").read_text()
        yield f"https://localhost:{port}/llm"
    finally:
        process.terminate()
        process.wait(20)


def _nginx(port: int, server_port: int, folder: Path) -> list[str]:
    text = (ROOT / "deploy" / "nginx.conf").read_text(encoding="utf-8")
    text = _replaced(text, "listen 443", f"listen 127.0.0.1:{port}")
    text = _replaced(text, "/etc/ssl/moeflow/fullchain.pem", str(TLS / "first.pem"))
    text = _replaced(text, "/etc/ssl/moeflow/privkey.pem", str(TLS / "first.key"))
    text = _replaced(text, "server 127.0.0.1:8000", f"server 127.0.0.1:{server_port}")
    own = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{main}http {{\naccess_log off;\n{own}{text}}}\n")
    return [str(NGINX), "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def _caddy(port: int, server_port: int, folder: Path) -> list[str]:
    text = (ROOT / "deploy" / "Caddyfile").read_text(encoding="utf-8")
    site = f"https://localhost:{port} {{\n\tbind 127.0.0.1\n\ttls {TLS / 'first.pem'} {TLS / 'first.key'}"
    text = _replaced(text, "models.example.org {", site)
    text = _replaced(text, "127.0.0.1:8000 {", f"127.0.0.1:{server_port} {{")
    options = "{\n\tadmin off\n\tauto_https off\n}\n"
    (folder / "Caddyfile").write_text(options + text)
    return [str(CADDY), "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def _replaced(text: str, old: str, new: str) -> str:
    assert len(re.findall(re.escape(old), text)) == 1, old
    return text.replace(old, new)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
