"""Who may see which stories.

With API keys: those of the own key, and those of batch jobs, whose files each key can read. Without keys, on a server
for this machine alone: all. On one that others can reach: any, by its id, which only its client knows; a list has no
ids then.
"""

from __future__ import annotations

import msgspec

from moeflow.server.request_log import RequestRecord
from moeflow.server.service import Service
from moeflow.server.stories.story import Story


def visible(service: Service, asker: RequestRecord, stories: list[Story]) -> list[Story]:
    """Return the stories that a request may see, if it names them."""
    if service.keys is None:
        return stories
    name = asker.account and asker.account.name
    return [story for story in stories if story.is_batch or story.key == name]


def listed(service: Service, asker: RequestRecord, stories: list[Story]) -> list[Story]:
    """Return the visible stories for a list: without ids, and so without a way to more, where others can ask, too."""
    found = visible(service, asker, stories)
    if service.keys is not None or is_private(service):
        return found
    return [msgspec.structs.replace(story, id="", object_id="", error=None) for story in found]


def is_private(service: Service) -> bool:
    """Whether only this machine can ask."""
    return service.config.is_loopback and not service.config.allowed_hosts
