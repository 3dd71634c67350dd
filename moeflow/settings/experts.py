"""Settings of experts: those that are not in memory, and those of encoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.predict.registry import NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.settings.option import setting

LOSSY_ROUTING: Final = {"sida": 1, "sida:3": 3}  # experts of a token, as SiDA was published with

_cache_setting = partial(setting, group="Expert cache")
_encoder_setting = partial(setting, group="Experts of encoders")


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Homes, eviction and prefetch of experts, and routing in encoders."""

    remote_experts: str | None = _cache_setting(
        "--remote-experts",
        "text",
        "HOST:PORT of machines that lend memory (`moeflow lend`), separated by commas. They keep and compute "
        "experts that do not fit into --memory, as far as that is faster than reading them from disk.",
    )
    expert_policy: str = _cache_setting(
        "--expert-policy",
        "choice",
        "Expert cache eviction policy.",
        default="auto",
        choices=("auto", *POLICIES),
    )
    predictor: str = _cache_setting(
        "--predictor",
        "choice",
        "Expert prefetch predictor, used where a trial shows that passes are faster with it. next-router:N: "
        "routers of up to N layers ahead. sida: the network of `moeflow train predictor`. combined: next-router, "
        "frequency, previous-token and the network, if there is one, weighed online.",
        default="auto",
        choices=("auto", *PREDICTORS, WHOLE_PASS, NO_PREDICTOR),
    )
    expert_capacity: int | None = _encoder_setting(
        "--expert-capacity",
        "count",
        "Tokens of an encoder's input that each expert takes; those beyond skip it, as when Switch Transformers "
        "are trained.",
        shown_default="all",
    )
    lossy_routing: str | None = _encoder_setting(
        "--lossy-routing",
        "choice",
        "The network of `moeflow train predictor` chooses an encoder's experts instead of the routers, one for "
        "each token or three. Answers change where it errs, and the model's name shows that.",
        shown_default="routers choose",
        choices=tuple(LOSSY_ROUTING),
    )
