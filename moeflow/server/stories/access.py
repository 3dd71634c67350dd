"""Who may see which stories.

With API keys: those of the own key, and those of batch jobs, whose files each key can read. Without keys: any, by an
id that only its client knows. On a server for this machine alone, programs and the page see all ids. Others get a list
without ids. They name a request by an id that the server made.
"""

from __future__ import annotations

import msgspec
from fastapi import Request

from moeflow.server.guard.admin import is_for_this_machine, is_from_own_page
from moeflow.server.request_log import is_secret, record_of
from moeflow.server.service import Service
from moeflow.server.stories.story import Story


def visible(service: Service, request: Request, stories: list[Story]) -> list[Story]:
    """Return the stories that a request may see, newest first, if it names them."""
    if service.keys is None:
        return stories
    account = record_of(request.scope).account
    return [story for story in stories if story.is_batch or story.key == (account and account.name)]


def named(service: Service, request: Request, stories: list[Story], name: str) -> Story | None:
    """Return the newest of the visible stories with this id; None: there is none, or the id is no secret."""
    found = next((story for story in visible(service, request, stories) if story.is_named(name)), None)
    if found is None or may_see_ids(service, request) or name == found.object_id or is_secret(name):
        return found
    return None


def listed(service: Service, request: Request, stories: list[Story]) -> list[Story]:
    """Return the visible stories for a list: without ids, unless a request may see these."""
    found = visible(service, request, stories)
    if may_see_ids(service, request):
        return found
    return [msgspec.structs.replace(story, id="", object_id="", error=None) for story in found]


def may_see_ids(service: Service, request: Request) -> bool:
    """Return whether a request may see ids of other requests. Without keys an id is the key to a request's text."""
    return service.keys is not None or (is_for_this_machine(service.config) and is_from_own_page(request))
