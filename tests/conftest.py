from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-instruction-sets", action="store_true", help="test CPU kernels under each, not under two")


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    """The folder of the built-in model, built once on this machine; tests that use it are marked `weights`."""
    from moeflow.cli.options import default_cache_dir  # here, since most tests need no torch
    from moeflow.core.errors import ConfigError
    from moeflow.train.builtin import builtin_folder, builtin_source, ensure_builtin_model

    if not builtin_folder(default_cache_dir()).is_dir():
        try:
            builtin_source()
        except ConfigError as error:
            pytest.skip(str(error))
    return ensure_builtin_model(default_cache_dir())
