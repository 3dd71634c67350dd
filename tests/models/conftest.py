"""Of a family's configurations, the first meets every format; each other one, of what is made for formats, one of them.

So every configuration goes through every way to run a model, and every family through every format; `--thorough` takes
the full product.
"""

import pytest


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    pairs = [test for test in tests if {"pair", "formats"} <= test.callspec.indices.keys()]
    num_formats = 1 + max((test.callspec.indices["formats"] for test in pairs), default=0)
    for test in pairs:
        config, formats = test.callspec.indices["pair"], test.callspec.indices["formats"]
        if config and (config + formats) % num_formats:
            test.add_marker(pytest.mark.thorough)
