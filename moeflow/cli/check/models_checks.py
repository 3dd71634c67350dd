"""Checks of the list of models."""

from __future__ import annotations

from urllib.parse import quote

from moeflow.cli.check.area import Area, Check
from moeflow.cli.check.openai_shapes import Model, ModelList
from moeflow.cli.check.outcome import expect, expect_equal
from moeflow.cli.check.target import ABSENT, Target

_PATH = "/v1/models"


def list_models(target: Target) -> None:
    """The list has all required fields and the model that answers."""
    names = [model.id for model in target.get(_PATH).read(ModelList).data]
    expect(target.model in names, f"the list must have {target.model!r}, not only {names}")


def retrieve_model(target: Target) -> None:
    """One model can be read by its name."""
    found = target.get(f"{_PATH}/{quote(target.model, safe='/')}").read(Model)
    expect_equal(found.id, target.model, "id")


def unknown_model_is_not_found(target: Target) -> None:
    """A model that is not there gets 404."""
    answer = target.get(f"{_PATH}/no-such-model")
    expect(answer.status in ABSENT, f"the status must be 404, not {answer.shown()}")


def models_checks() -> list[Check]:
    """Return the checks."""
    area = Area("models", _PATH)
    return [
        area.check(list_models, "OpenAI API reference: models, list"),
        area.check(retrieve_model, "OpenAI API reference: models, retrieve"),
        area.check(unknown_model_is_not_found, "OpenAI API reference: models, retrieve"),
    ]
