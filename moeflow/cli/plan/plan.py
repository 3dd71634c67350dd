"""`moeflow plan`: how to run a model on a machine, what to expect, and what would help."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moeflow.cli import lazy
from moeflow.cli.bench.output import show
from moeflow.cli.config_file import config_option
from moeflow.cli.help import Command, GroupedOption
from moeflow.cli.local_model import built_in_model
from moeflow.cli.options import cache_dir_option, settings_option
from moeflow.cli.params import NEW_PICTURE, complete_model
from moeflow.cli.plan.inputs import routing_of, workload_of
from moeflow.cli.plan.output import check_json, check_table, forecast_of, plan_tables, policy_table, short_name
from moeflow.cli.progress import bar, progress_bar, steps
from moeflow.cli.pulling import headers_of, is_headers_alone
from moeflow.core.errors import ConfigError, MoeflowError
from moeflow.core.plan import GOALS, Goal, Plan, Workload, plan_to_json
from moeflow.planner.hardware.machine_files import machine_names
from moeflow.planner.usage import Usage

if TYPE_CHECKING:
    from moeflow.planner.described import Planned
    from moeflow.planner.planning import PlanRequest
    from moeflow.settings.settings import Settings

MAX_SEQUENCES = 1 << 15  # that a plan is made for

EPILOG = f"""\b
Examples:
  moeflow plan
      the built-in model on this machine
  moeflow plan ~/models/olmoe --memory 4GiB
      with experts that come from disk
  moeflow plan ~/models/olmoe --memory 4GiB --for-server
      the same for `serve` and `batch`, which have two processes
  moeflow plan ~/models/olmoe --ranks 2
      two processes that share the model, or with --replicas 2 two
      engines: what is that worth here?
  moeflow plan ~/models/olmoe --goal latency --rate 2
      two requests a second
  moeflow plan mixtral-8x7b --machine t4 --prompt-len 418 --gen-len 128
  moeflow plan config.json --machine l4 --prompts questions.jsonl \\
      --roofline roofs.png --policy-map map.png
  moeflow plan Qwen/Qwen3-30B-A3B
      before it is pulled: a few megabytes of headers are read
  moeflow plan ~/models/olmoe --json > plan.json
      for programs, and for --plan
  moeflow plan ~/models/olmoe --validate
      and run it: predicted beside measured

This machine is measured first, in some twenty seconds, while nothing else should run; again with --recalibrate, or if a
glance before a later plan shows that it became slower or faster.
Machines that are shipped: {", ".join(machine_names())}; others are described in a file like these.
Only headers of a model are read: the answer does not depend on its size."""


@click.command(cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--machine", metavar="NAME|FILE", help="Plan for another machine.", show_default="this one")
@click.option("--recalibrate", is_flag=True, help="Measure this machine again.")
@click.option("--goal", type=click.Choice(GOALS), default="throughput", help="Objective.")
@click.option("--prompt-len", type=click.IntRange(1), default=256, help="Tokens of a prompt, on average.")
@click.option("--gen-len", type=click.IntRange(1), default=128, help="Tokens of an answer, on average.")
@click.option(
    "--prompts",
    cls=GroupedOption,
    group="Workload",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take lengths from a JSONL of prompts.",
)
@click.option(
    "--rate",
    cls=GroupedOption,
    group="Workload",
    type=click.FloatRange(0),
    default=0.0,
    help="Requests a second; 0: all are there at once.",
)
@click.option(
    "--batch-size", type=click.IntRange(1, MAX_SEQUENCES), help="Sequences that decode together.", show_default="best"
)
@settings_option("memory_bytes")
@click.option(
    "--for-server",
    "is_served",
    cls=GroupedOption,
    group="Memory",
    is_flag=True,
    help="For `serve` and `batch`: --memory covers their second process, too.",
)
@settings_option("dtype")
@settings_option("quantize")
@settings_option("kv_dtype")
@settings_option("num_threads")
@settings_option("num_ranks")
@settings_option("expert_layout")
@settings_option("expert_placement")
@settings_option("num_redundant_experts")
@settings_option("attention_layout")
@settings_option("num_replicas")
@settings_option("device")
@settings_option("gpu_memory_bytes")
@click.option(
    "--routing",
    cls=GroupedOption,
    group="Machine",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What --record-routing wrote: how often experts on disk are needed.",
    show_default="what `moeflow pack` has learnt",
)
@click.option("--validate", is_flag=True, help="Run the model as planned, too: predicted beside measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON; with --validate, what came of it.")
@click.option(
    "--roofline",
    cls=GroupedOption,
    group="Pictures",
    type=NEW_PICTURE,
    help="Draw attention and experts under their roofs into this PNG.",
)
@click.option(
    "--policy-map",
    cls=GroupedOption,
    group="Pictures",
    type=NEW_PICTURE,
    help="Draw how the policy changes with the machine into this PNG.",
)
@cache_dir_option
@config_option
def plan(
    model: str | None,
    machine: str | None,
    recalibrate: bool,
    prompts: Path | None,
    prompt_len: int,
    gen_len: int,
    rate: float,
    routing: Path | None,
    validate: bool,
    as_json: bool,
    roofline: Path | None,
    policy_map: Path | None,
    goal: Goal,
    batch_size: int | None,
    **overrides: Any,
) -> None:
    """Plan how to run a model on this or another machine, and predict its speed.

    MODEL is a Hugging Face folder, a .gguf file, a model's name on the hub, a bare config.json, or one of the shapes
    that are shipped (mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b, gpt-moe, olmoe-1b-7b, mixtral-8x22b, dbrx); without
    it, the built-in model.
    """
    if roofline is not None or policy_map is not None:
        require_matplotlib()
    has_replicas = (overrides["num_replicas"] or 1) > 1
    _check(validate=validate, recalibrate=recalibrate, machine=machine, has_replicas=has_replicas)
    overrides["is_served"] = overrides["is_served"] or has_replicas  # which is where there can be several
    named = model or str(built_in_model(overrides["cache_dir"]))
    if os.path.lexists(named):
        named = os.path.abspath(named)  # --plan may run in another folder
    name = click.get_current_context().with_resource(headers_of(named, is_run=validate))
    workload = Workload(prompt_len=prompt_len, gen_len=gen_len, max_prompt_len=prompt_len, rate=rate)
    num_requests = None
    if prompts is not None:
        workload, num_requests = workload_of(prompts, name, gen_len, rate)
    request = lazy.PlanRequest(
        settings=lazy.Settings(model=name, **overrides),
        usage=Usage(
            workload=workload,
            goal=goal,
            num_sequences=batch_size,
            num_requests=num_requests,
            reserves_kv=True,
        ),
        machine=machine,
        recalibrate=recalibrate,
        routing=None if routing is None else routing_of(routing),
    )
    planned = _planned(request)
    if validate and routing is None and has_to_learn(planned):
        learn(request.settings)
        planned = _planned(dataclasses.replace(request, recalibrate=False))
    made = under_its_name(planned.plan, named)
    if validate:
        validated(planned, as_json=as_json)
    elif as_json:
        click.echo(plan_to_json(made), nl=False)
    else:
        for table in plan_tables(made):
            show(table)
    _draw(planned, made, roofline=roofline, policy_map=policy_map)


def _check(*, validate: bool, recalibrate: bool, machine: str | None, has_replicas: bool) -> None:
    """Raises: ConfigError for conflicting options."""
    if validate and machine is not None:
        raise ConfigError("--validate runs the model on this machine; remove --machine")
    if validate and has_replicas:
        raise ConfigError("--validate runs one engine; remove --replicas, or measure with `moeflow bench serve`")
    if recalibrate and machine is not None:
        raise ConfigError("--recalibrate measures this machine; remove --machine")


def _planned(request: PlanRequest) -> Planned:
    with steps("Planning") as say:
        return lazy.plan_for(request, say)


def _draw(planned: Planned, made: Plan, *, roofline: Path | None, policy_map: Path | None) -> None:
    """Draw the pictures that have a file."""
    title = f"{short_name(made.config.model_path)} on {made.machine}"
    if roofline is not None:
        lazy.plot_rooflines(lazy.roofline_figures(planned.model, forecast_of(made).policy), title, roofline)
    if policy_map is not None:
        with bar(lazy.num_map_points(planned.model)) as shown:
            lazy.plot_policy_map(lazy.policy_map(planned.model, planned.objective, shown.advance), title, policy_map)


def under_its_name(plan: Plan, named: str) -> Plan:
    """Return a plan for the model's name, if it was made from headers, which are gone when somebody reads it."""
    if not is_headers_alone(plan.config.model_path):
        return plan
    config = dataclasses.replace(plan.config, model_path=named)
    return dataclasses.replace(plan, config=config, settings=plan.settings | {"model": named})


def has_to_learn(planned: Planned) -> bool:
    """Return whether speeds depend on routing that is not known yet."""
    return forecast_of(planned.plan).policy.experts_on_disk > 0 and not planned.model.routing.decode


def learn(settings: Settings) -> None:
    """Learn how the planned model's routers choose, so that predictions know it."""
    with progress_bar("Learning its routing") as on_done:
        try:
            lazy.ensure_profile(settings, on_done)
        except (MoeflowError, OSError) as error:  # no tokenizer, say
            click.echo(f"How its routers choose could not be learnt, and is taken to be even: {error}", err=True)


def validated(planned: Planned, *, as_json: bool) -> None:
    """Run the plan and print measurements beside predictions."""
    run = lazy.PlanValidation(planned)
    with progress_bar("Loading") as on_progress:
        run.load(on_progress)
    try:
        with bar(run.num_steps) as shown:
            run.run(shown.say, shown.advance)
        rows = run.rows()
    finally:
        run.close()
    if as_json:
        click.echo(check_json(planned.plan, rows))
    else:
        show(policy_table(planned.plan))
        show(check_table(rows))


def require_matplotlib() -> None:
    """Raises: ClickException if there is none, before anything is planned in vain."""
    try:
        _ = lazy.plot_rooflines
    except ImportError as error:
        raise click.ClickException(f"pictures need matplotlib ({error}): pip install 'moeflow[bench]'") from error
