"""Makes a Mixture-of-Experts model whose experts learn: branch, train, mix (arXiv 2403.07816).

Each expert learns alone from one text. Then routers are fitted, and a joint phase trains all of them on all texts.
Finished parts stay in a work folder next to the result, so that a stopped run resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor, float32

from moeflow.checkpoint.atomic_folder import check_place
from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import content_fingerprint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.models.registry import read_model_config
from moeflow.planner.hardware.host import host_resources
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.experts.adapters import Adapters, factor_bytes
from moeflow.train.experts.network import ExpertNetwork, training_dtype
from moeflow.train.experts.recipe import ExpertRecipe
from moeflow.train.experts.routers import block_inputs, fit_domain_router
from moeflow.train.experts.saved import TrainedExperts
from moeflow.train.experts.task import EVALUATED, ExpertTask, cut, router_name
from moeflow.train.experts.texts import LearningText, learning_texts
from moeflow.train.loop import TrainingLoop
from moeflow.train.phases import OnDone, OnProgress, Phase, ignore
from moeflow.train.schedule import Schedule
from moeflow.train.speculators.student import Student, student_from
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycled_checkpoint import check_source
from moeflow.train.upcycling import check_out, space_needed, upcycle
from moeflow.train.work_folder import WorkFolder, digest_of, work_folder

SEQUENCE_TOKENS: Final = 512  # of an expert's own training
JOINT_TOKENS: Final = 256  # of each text in a joint step
_ROWS: Final = 2  # sequences in a step of an expert's own training
_ROUTER_TOKENS: Final = 2048  # of each text
_BRANCH_SHARE: Final = 0.7  # of the time
_JOINT_RATE: Final = 0.25  # of the learning rate
_EVALUATIONS: Final = 4
_EVALUATE_EVERY: Final = 20  # steps, with a time budget
_LOGIT_BYTES: Final = 12  # logits, their logarithms and gradients in float32
_FACTOR_COPIES: Final = 5  # in memory: weights, the best, gradients, and two of the optimizer
_FILE_COPIES: Final = 9  # branches, and a state of 4 copies twice while it is replaced
_PATIENCE: Final = 3  # evaluations without a better loss


def train_experts(
    source: Path,
    out: Path,
    recipe: ExpertRecipe,
    files: Mapping[str, Path],
    *,
    overwrite: bool = False,
    restart: bool = False,
    on_progress: OnProgress = ignore,
) -> None:
    """Make a Mixtral-architecture model in folder `out`, with one expert for each text; resume unfinished work.

    Raises: as `upcycle`; ConfigError if unfinished work has other options.
    """
    upcycled = UpcycleRecipe(num_experts=len(files), top_k=recipe.top_k)
    check_out(source, out)
    with closing(open_checkpoint(source)) as checkpoint:
        check_source(checkpoint)
        shape = read_model_config(checkpoint)
        need_bytes = space_needed(checkpoint, shape, upcycled) + _work_bytes(shape, recipe, len(files))
        with work_folder(work_place(out)) as work:
            check_place(out.absolute(), need_bytes=need_bytes, overwrite=overwrite)
            if restart:
                work.clear()
            tokenizer = Tokenizer.load(source)
            texts = learning_texts(tokenizer.encode, files)
            inputs = inputs_of(checkpoint, texts)
            work.check_recipe({"source": str(source.absolute()), "data": _absolute(files), **inputs, **asdict(recipe)})
            trained = train(checkpoint, texts, recipe, work, on_progress)
            upcycle(source, out, upcycled, trained=trained, overwrite=overwrite, on_progress=on_progress)
            work.clear()


def work_place(out: Path) -> Path:
    """Return the folder of unfinished work."""
    return out.absolute().with_name(f"{out.name}.training")


def inputs_of(checkpoint: Checkpoint, texts: Sequence[LearningText]) -> dict[str, Any]:
    """Return the contents of source and texts, as a work folder records them."""
    return {
        "weights of the source": content_fingerprint(checkpoint),
        "content of the texts": {text.name: digest_of([text.learn, text.validation]) for text in texts},
    }


def train(
    checkpoint: Checkpoint, texts: Sequence[LearningText], recipe: ExpertRecipe, work: WorkFolder, report: OnProgress
) -> TrainedExperts:
    """Return adapters and routers of one expert for each text.

    Raises: CapacityError if memory does not hold the model; CheckpointError; ConfigError if the disk is full.
    """
    dense = _load(checkpoint, recipe, len(texts), partial(report, Phase.READING))
    branches = [_branch(dense, text, recipe, number, len(texts), work, report) for number, text in enumerate(texts)]
    routers = _routers(dense, branches, texts, work, partial(report, Phase.ROUTERS))
    mixed = _network(dense, Adapters.stacked(branches), routers=routers, top_k=recipe.top_k)
    return _joint(mixed, texts, recipe, work, report)


def _load(checkpoint: Checkpoint, recipe: ExpertRecipe, num_texts: int, report: OnDone) -> Student:
    """Return the dense model. Raises: CapacityError, CheckpointError."""
    shape, dtype, num_values = read_model_config(checkpoint), training_dtype(), checkpoint.tensors.num_values
    factors_bytes = num_texts * factor_bytes(shape, recipe.rank)
    need_bytes = num_values * dtype.itemsize * 2 + _logits_bytes(shape, num_texts) + _FACTOR_COPIES * factors_bytes
    have_bytes = host_resources().available_bytes
    if need_bytes > have_bytes:
        raise CapacityError(
            f"not enough memory to train {checkpoint.path}: need {format_bytes(need_bytes)}, have "
            f"{format_bytes(have_bytes)}. Close other programs, or use a smaller model"
        )
    total = num_values * dtype.itemsize
    report(0, total)
    student = student_from(checkpoint, shape.num_layers, dtype)
    report(total, total)
    return student


def _logits_bytes(shape: ModelConfig, num_texts: int) -> int:
    """Return the memory for the logits of the largest batch."""
    num_tokens = max(EVALUATED * SEQUENCE_TOKENS, _ROWS * SEQUENCE_TOKENS, num_texts * JOINT_TOKENS)
    return num_tokens * shape.vocab_size * _LOGIT_BYTES


def _work_bytes(shape: ModelConfig, recipe: ExpertRecipe, num_texts: int) -> int:
    """Return the disk space of the work folder, at the end of the joint training."""
    routers_bytes = shape.num_layers * shape.hidden_size * float32.itemsize  # rows of one expert
    return num_texts * (factor_bytes(shape, recipe.rank) + routers_bytes) * _FILE_COPIES


def _branch(
    dense: Student,
    text: LearningText,
    recipe: ExpertRecipe,
    number: int,
    num_texts: int,
    work: WorkFolder,
    report: OnProgress,
) -> Adapters:
    """Return one expert that has learnt from its text."""
    untrained = Adapters.untrained(dense.shape, recipe.rank, recipe.seed * 1_000_003 + number)
    schedule = _schedule(recipe.steps, recipe.minutes * 60 * _BRANCH_SHARE / num_texts)
    task = ExpertTask(
        _network(dense, untrained),
        [cut(text.learn, SEQUENCE_TOKENS)],
        cut(text.validation, SEQUENCE_TOKENS),
        rows=_ROWS,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
    )

    def on_done(done: int, total: int) -> None:
        report(Phase.BRANCHES, number * total + done, num_texts * total)

    return Adapters(_trained(task, schedule, work, f"branch-{text.name}", on_done))


def _routers(
    dense: Student, branches: Sequence[Adapters], texts: Sequence[LearningText], work: WorkFolder, report: OnDone
) -> list[Tensor]:
    """Return a first router for each layer."""
    file = work.file("routers")
    if (kept := file.load()) is not None:
        return [kept[0][router_name(layer)] for layer in range(dense.shape.num_layers)]
    inputs = [
        block_inputs(_network(dense, branch), cut(text.learn[:_ROUTER_TOKENS], SEQUENCE_TOKENS))
        for branch, text in zip(branches, texts, strict=True)
    ]
    routers = []
    for layer, of_texts in enumerate(zip(*inputs, strict=True)):
        routers.append(fit_domain_router(of_texts))
        report(layer + 1, dense.shape.num_layers)
    file.save({router_name(layer): router for layer, router in enumerate(routers)})
    return routers


def _joint(
    mixed: ExpertNetwork, texts: Sequence[LearningText], recipe: ExpertRecipe, work: WorkFolder, report: OnProgress
) -> TrainedExperts:
    """Return adapters and routers after the training on all texts."""
    task = ExpertTask(
        mixed,
        [cut(text.learn, JOINT_TOKENS) for text in texts],
        [piece for text in texts for piece in cut(text.validation[:SEQUENCE_TOKENS], SEQUENCE_TOKENS)],
        rows=1,
        learning_rate=recipe.learning_rate * _JOINT_RATE,
        seed=recipe.seed,
    )
    schedule = _schedule(recipe.joint_steps, recipe.minutes * 60 * (1 - _BRANCH_SHARE))
    trained = _trained(task, schedule, work, "joint", partial(report, Phase.JOINT))
    names = [router_name(layer) for layer in range(mixed.shape.num_layers)]
    factors = {name: weight for name, weight in trained.items() if name not in names}
    return TrainedExperts(Adapters(factors), [trained[name] for name in names])


def _trained(task: ExpertTask, schedule: Schedule, work: WorkFolder, name: str, report: OnDone) -> dict[str, Tensor]:
    """Return the trained weights, from the work folder if they are complete."""
    result, state = work.file(name), work.file(f"state-{name}")
    if (kept := result.load()) is None:
        loop = TrainingLoop(task, schedule, state)
        loop.run(lambda progress: report(*schedule.count(progress)))
        weights = {name: weight.detach() for name, weight in task.weights.items()}
        result.save(weights, {"progress": asdict(loop.progress)})
        state.path.unlink()
    else:
        weights = kept[0]
    report(*_all(schedule))
    return weights


def _all(schedule: Schedule) -> tuple[int, int]:
    total = max(int(schedule.seconds if schedule.steps is None else schedule.steps), 1)
    return total, total


def _network(dense: Student, adapters: Adapters, *, routers: Sequence[Tensor] = (), top_k: int = 1) -> ExpertNetwork:
    return ExpertNetwork(dense.shape, dense.weights, adapters, routers, top_k)


def _schedule(steps: int | None, seconds: float) -> Schedule:
    if steps is None:
        return Schedule(seconds=seconds, evaluate_every=_EVALUATE_EVERY, patience=_PATIENCE)
    return Schedule(steps=steps, evaluate_every=max(steps // _EVALUATIONS, 1), patience=_PATIENCE)


def _absolute(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: str(file.absolute()) for name, file in files.items()}
