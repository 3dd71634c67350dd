"""Starts the continuation of plain texts, for all APIs: without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.generator import Generator
from moeflow.server.generation import Generation, Prepared, start_generation
from moeflow.server.served_model import ServedModel
from moeflow.server.service import Service
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import Form, UserGrammar


async def start_text_generation(
    service: Service,
    served: ServedModel,
    request_id: str,
    prompts: Sequence[str | list[int]],
    sampling: SamplingParams,
    form: Form | None,
    *,
    is_batch: bool = False,
    client: str | None = None,
) -> Generation:
    """Check and admit a request; the work begins when the generation is iterated. `served` as for `start_generation`.

    Raises: ApiError, RequestError.
    """

    async def prepare(generator: Generator) -> Prepared:
        encoded, grammar = await generator.encode(prompts), ""
        if form is not None:
            users = form if isinstance(form, UserGrammar) else None
            grammar = await generator.checked(partial(plain_grammar, form), users, client=client)
        return Prepared(encoded, replace(sampling, grammar=grammar))

    num_sequences = len(prompts) * sampling.n
    return await start_generation(service, served, request_id, prepare, num_sequences, is_batch=is_batch)
