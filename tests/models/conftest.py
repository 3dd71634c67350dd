"""A family's first configuration runs with every second format, and the next family's first with the others. Each other
configuration runs with one of the formats.

So every configuration goes through every way to run a model, and every format through half of all families;
`--thorough` takes the full product.
"""

import pytest


@pytest.hookimpl(tryfirst=True)  # before marked tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    pairs = [test for test in tests if {"pair", "formats"} <= test.callspec.indices.keys()]
    num_formats = 1 + max((test.callspec.indices["formats"] for test in pairs), default=0)
    families = list(dict.fromkeys(test.path for test in pairs))
    for test in pairs:
        config, formats = test.callspec.indices["pair"], test.callspec.indices["formats"]
        if (config + formats) % num_formats if config else (families.index(test.path) + formats) % 2:
            test.add_marker(pytest.mark.thorough)
