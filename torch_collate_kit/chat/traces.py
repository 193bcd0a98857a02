"""Traces of agents, whose events form a tree -> the conversations in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_collate_kit.errors import DataError

_PARENTS = {"parentUuid": "uuid", "parentId": "id"}  # Claude Code, pi


def trace_paths(events: Sequence[Any]) -> list[list[Any]]:
    """Return the paths of a trace: each last event with those before it, in order of the file.

    Args:
        events: the lines of a trace as mappings, with ``uuid`` and ``parentUuid``, or ``id`` and
            ``parentId``. Events of a side chain (``isSidechain``) are left out; those without a
            parent key belong to every path.

    Returns a list of paths. An answer that an earlier path has, or that is an error of the provider
    (``isApiErrorMessage``), gets ``train: False`` in a copy of its message, so that each answer is
    trained once; other events are those given.

    Raises:
        DataError: an event is no mapping, two have one id, or a parent is missing or its own
            ancestor. The message names the event.

    >>> asked = {"uuid": "1", "parentUuid": None, "message": {"role": "user", "content": "Hi"}}
    >>> answers = [
    ...     {"uuid": n, "parentUuid": "1", "message": {"role": "assistant", "content": n}}
    ...     for n in ("2", "3")
    ... ]
    >>> [[event["message"]["content"] for event in path] for path in trace_paths([asked, *answers])]
    [['Hi', '2'], ['Hi', '3']]
    """
    parents: dict[Any, Any] = {}  # of the events with a place in the tree
    own: list[Any] = []
    for i, event in enumerate(events):
        if not isinstance(event, Mapping):
            raise DataError(f"event {i} is {event!r:.40}; give each line of the trace as a mapping")
        key = next((key for key in _PARENTS if key in event), None)
        is_side = bool(event.get("isSidechain"))
        own.append(... if is_side else None if key is None else event.get(_PARENTS[key]))
        if key is not None and not is_side:
            if own[i] is None or own[i] in parents:
                raise DataError(f"event {i} has {_PARENTS[key]} {own[i]!r}; each needs its own")
            parents[own[i]] = event[key]
    paths, known = [], set[Any]()
    for leaf in [i for i in parents if i not in parents.values()] or ([] if parents else [None]):
        line, place = set[Any]([None]), leaf
        while place is not None:
            if place in line or place not in parents:
                raise DataError(f"the parent {place!r} is missing, or its own ancestor, in a trace")
            line.add(place)
            place = parents[place]
        pairs = zip(events, own, strict=True)
        paths.append([_marked(event, i in known) for event, i in pairs if i in line])
        known |= line
    if parents and not paths:
        raise DataError("every event of the trace is an ancestor of itself; repair its parents")
    return paths


def _marked(event: Any, is_known: bool) -> Any:
    message = event.get("message", event)
    is_answer = isinstance(message, Mapping) and message.get("role") == "assistant"
    if not is_answer or not (is_known or event.get("isApiErrorMessage")):
        return event
    marked = {**message, "train": False}
    return marked if message is event else {**event, "message": marked}
