"""The token's file: made once, for its owner alone; a token of bad length or readable by others is refused."""

import os
from pathlib import Path

import pytest

from moeflow.core.errors import ConfigError
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token, read_token


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    file = default_token_file(tmp_path / "cache")
    token = ensure_token(file)
    assert len(token) == 64
    assert (ensure_token(file), read_token(file)) == (token, token)
    assert file.stat().st_mode & 0o777 == 0o600
    assert ensure_token(tmp_path / "another") != token


def test_a_token_that_is_not_there_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read from .*none \(No such file or directory\): copy the head's"):
        read_token(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written to"):
        ensure_token(Path("/proc/none/token"))


@pytest.mark.parametrize(("text", "number"), [("", 0), ("  short  \n", 5), ("x" * 5000, 4097)])
def test_what_is_no_secret_is_refused(tmp_path, text, number):
    (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match=f"has {number} characters, where 16 to 4096"):
        read_token(tmp_path / "token")


def test_a_token_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "token"
    token = ensure_token(file)
    is_root = os.geteuid() == 0
    for mode in (0o644, 0o660, *([] if is_root else [0o640])):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"others can read .*chmod 600 {file}"):
            read_token(file)
    for mode in (0o400, *([0o640] if is_root else [])):  # Kubernetes mounts secrets as root's, for a group
        file.chmod(mode)
        assert read_token(file) == token
    assert list(tmp_path.iterdir()) == [file]
