"""More threads than there may be are refused with a remedy, by the settings or by the system."""

import dataclasses

import pytest

from moeflow.core.errors import CapacityError, ConfigError
from moeflow.engine import compute_setup
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import MAX_THREADS, Settings
from tests.shapes import ENGINE


@pytest.mark.parametrize("count", [MAX_THREADS + 1, 100_000, 10**30])
@pytest.mark.parametrize("name", ["num_threads", "num_ranks", "num_replicas"])
def test_settings_have_a_bound(name, count):
    with pytest.raises(ConfigError, match=rf"{name} must be at most {MAX_THREADS}, not {count}; take as many as cores"):
        resolve(Settings(model="any", **{name: count}))


def test_what_the_system_refuses_is_explained(monkeypatch):
    def refuse(count):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(extension, "use_isa", lambda _: None)
    monkeypatch.setattr(extension, "set_num_threads", refuse)
    with pytest.raises(CapacityError, match=r"900 threads cannot be started \(Resource .* Take fewer \(--threads\)"):
        compute_setup.set_up(dataclasses.replace(ENGINE, cpu_isa="any", num_threads=900))
