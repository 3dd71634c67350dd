"""Runs the study on one classifier: what its texts use, how right it is, and how fast within shares of its experts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import SlabIndex
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig
from moeflow.core.engine_messages import ModelInfo
from moeflow.core.errors import ConfigError, EngineError
from moeflow.models.expert_predictor.network import ExpertPredictor
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import is_saved, load_predictor, predictor_folder
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import LOSSY_ROUTING, Settings
from studies.sida.arms import RESIDENT, TURN, WAYS, Arm, Way, config_of
from studies.sida.labels import read_texts
from studies.sida.permuted import permuted_experts
from studies.sida.usage import usage_of

Classes = np.ndarray[Any, Any]  # numbers of the classes, [texts]

WARM_UP: Final = 40  # texts that are not counted
NUM_PERMUTATIONS: Final = 3  # of each layer's experts
MIN_SLOTS: Final = 4


class SidaStudy:
    """A classifier, all of it in memory, and texts for it."""

    def __init__(
        self,
        model: Path,
        data: Path,
        *,
        num_texts: int,
        num_threads: int | None = None,
        cache_dir: Path | None = None,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load it, and pack its experts. `num_texts` are classified within each share, beside those to warm up.

        Raises: ConfigError if it is no classifier with experts, or the texts are none for it or too few.
        """
        _check_is_classifier(model)
        settings = Settings(model=str(model), num_threads=num_threads, max_num_seqs=1, max_model_len=1024)
        self._config: EngineConfig = replace(resolve(settings).config, packed_file="")
        self._stack = ExitStack()
        self._resident = self._stack.enter_context(closing(Arm(RESIDENT, self._config)))
        try:
            text = read_texts(data, model, self.info.labels)
            self.texts: Sequence[list[int]] = [ids.tolist() for ids in text.token_ids]
            self._classes = text.classes.numpy()
            if len(self.texts) < num_texts + WARM_UP:
                raise ConfigError(
                    f"{data} has {len(self.texts)} texts, and {WARM_UP} to warm up and {num_texts} to measure are "
                    "needed: ask for fewer (--texts)"
                )
            self._timed = self.texts[: num_texts + WARM_UP]
            self.index: SlabIndex = pack(str(model), None, cache_dir=cache_dir, on_bytes=on_bytes)
            self._predictor = _predictor_of(model)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SidaStudy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def info(self) -> ModelInfo:
        """What is known of the model."""
        return self._resident.engine.model

    @property
    def num_threads(self) -> int:
        """That compute."""
        return self._config.num_threads

    @property
    def ways(self) -> list[Way]:
        """Those that can be compared."""
        return [way for way in WAYS if self._predictor is not None or way.predictor == "none"]

    def model_fields(self) -> dict[str, Any]:
        """Return what the model is, and what takes memory."""
        spec = self.index.spec
        return {
            "model": self.info.name,
            "num_layers": spec.num_layers,
            "num_experts": spec.num_experts,
            "slab_bytes": spec.slab_bytes,
            "dense_bytes": spec.resident_bytes,
            "num_texts": len(self.texts),
        }

    def usage_fields(self, on_text: Callable[[], None], budget_s: float = math.inf) -> dict[str, Any]:
        """Return what each text uses of experts, and how much of that the predictor names.

        Blocks: for no longer than `budget_s`; what texts are left then is left out.
        """
        found = usage_of(self._resident.model, self._predictor, self.texts, on_text, budget_s)
        fields = asdict(found)
        del fields["hits"], fields["num_choices"]
        return fields | {"hit_rates": found.hit_rates() if found.num_choices else None}

    def fidelity_fields(self, on_text: Callable[[], None], budget_s: float = math.inf) -> dict[str, Any]:
        """Return how many texts get the right class: by the model's routers, by these with permuted experts, and by
        the predictor.

        Blocks: for about `budget_s`; what texts are left then is left out.
        """
        lossy = LOSSY_ROUTING if self._predictor is not None else {}
        own = self._classes_of(self._resident, self.texts, on_text, budget_s / (1 + NUM_PERMUTATIONS + len(lossy)))
        right, texts = self._classes[: len(own)], self.texts[: len(own)]
        fields: dict[str, Any] = {"own": _scores(own, own, right) | {"num_texts": len(own)}}
        blocks = [block for _, block in self._resident.model.moe_blocks()]
        wrong = []
        for seed in range(NUM_PERMUTATIONS):
            with permuted_experts(blocks, seed):
                wrong.append(_scores(self._classes_of(self._resident, texts, on_text, math.inf), own, right))
        fields["permuted"] = {name: statistics.fmean(scores[name] for scores in wrong) for name in wrong[0]}
        for name, top_k in lossy.items():
            with closing(Arm(name, replace(self._config, lossy_top_k=top_k))) as arm:
                fields[name] = _scores(self._classes_of(arm, texts, on_text, math.inf), own, right)
        return fields

    def _classes_of(
        self, arm: Arm, texts: Sequence[list[int]], on_text: Callable[[], None], budget_s: float
    ) -> Classes:
        start, began_s = len(arm.answers), time.perf_counter()
        for text in texts:
            arm.classify([text])
            on_text()
            if time.perf_counter() - began_s > budget_s:
                break
        return np.array([np.frombuffer(it, dtype=np.float32).argmax() for it in arm.answers[start:]])

    def rows(
        self, share: int, *, lossy_top_k: int, on_text: Callable[[], None], budget_s: float = math.inf
    ) -> list[dict[str, Any]]:
        """Return how fast texts are classified with a share (in percent) of the experts in memory, in each way.

        All but the lossy way must answer with the same bits. Blocks: for about `budget_s`; a third of it is warm-up.
        Raises: EngineError if they do not.
        """
        began_s = time.perf_counter()
        num_slots = max(self.index.spec.num_slabs * share // 100, MIN_SLOTS)
        slots = ExpertSlotsConfig(
            packed_weights_file=str(self.index.path), num_slots=num_slots, slab_bytes=self.index.spec.slab_bytes
        )
        self._resident.answers.clear()
        with ExitStack() as stack:
            arms = [self._resident]
            for way in self.ways:
                config = config_of(way, self._config, slots, lossy_top_k=lossy_top_k)
                arms.append(stack.enter_context(closing(Arm(way.name, config, way.experts))))
            before = self._run_all(arms, on_text, began_s, budget_s)
            for way, arm in zip(self.ways, arms[1:], strict=True):
                if not way.is_lossy and arm.answers != self._resident.answers:
                    raise EngineError(f"experts that come {way.name} changed the probabilities of a text")
            return [
                {"share": share, "num_slots": num_slots, **_figures(arm, stats)}
                for arm, stats in zip(arms, before, strict=True)
            ]

    def _run_all(self, arms: Sequence[Arm], on_text: Callable[[], None], began_s: float, budget_s: float) -> list[Any]:
        """Have all classify the texts alternately; return their statistics as they were when warm."""
        turns = [self._timed[start : start + TURN] for start in range(0, len(self._timed), TURN)]
        num_warm = self._run_turns(arms, turns[: WARM_UP // TURN], on_text, began_s + budget_s / 3)
        for arm in arms:
            arm.seconds.clear()
        before = [arm.engine.stats() for arm in arms]
        self._run_turns(arms, turns[num_warm:], on_text, began_s + budget_s)
        return before

    def _run_turns(
        self,
        arms: Sequence[Arm],
        turns: Sequence[Sequence[list[int]]],
        on_text: Callable[[], None],
        until_s: float,
    ) -> int:
        """Have all classify texts turn by turn, another first in each; return how many turns there were in time."""
        for number, texts in enumerate(turns):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                self._turn(arm, texts, on_text)
            if time.perf_counter() > until_s:
                return number + 1
        return len(turns)

    def _turn(self, arm: Arm, texts: Sequence[list[int]], on_text: Callable[[], None]) -> None:
        arm.classify(texts)
        for _ in texts:
            on_text()


def _scores(found: Classes, own: Classes, right: Classes) -> dict[str, float]:
    """Return the share of right classes, the share of classes that the routers give too, and F1 of the last class."""
    last = max(right.max(), found.max())
    num_last = int((found == last).sum() + (right == last).sum())
    return {
        "right": float((found == right).mean()),
        "same": float((found == own).mean()),
        "f1": 2 * float(((found == last) & (right == last)).sum()) / num_last,
    }


def _check_is_classifier(model: Path) -> None:
    with closing(open_checkpoint(model)) as checkpoint:
        shape = read_model_config(checkpoint)
    if not shape.labels or not shape.routing.num_experts:
        raise ConfigError(f"{model} is no classifier with experts: make one with `moeflow train classifier`")


def _predictor_of(model: Path) -> ExpertPredictor | None:
    folder = predictor_folder(model)
    if not is_saved(folder):
        return None
    with closing(open_checkpoint(model)) as checkpoint:
        return for_serving(load_predictor(folder, checkpoint))


def _figures(arm: Arm, before: Any) -> dict[str, Any]:
    now, number = arm.engine.stats(), len(arm.seconds)
    read = sum(
        getattr(now, f"expert_{kind}_bytes_total") - getattr(before, f"expert_{kind}_bytes_total")
        for kind in ("demand", "prefetched")
    )
    return {
        "way": arm.name,
        "texts_per_s": number / sum(arm.seconds),
        "latency_s": statistics.median(arm.seconds),
        "text_s": [round(seconds, 6) for seconds in arm.seconds],
        "read_bytes_per_text": read / number,
        "stall_s_per_text": (now.expert_stall_s_total - before.expert_stall_s_total) / number,
    }
