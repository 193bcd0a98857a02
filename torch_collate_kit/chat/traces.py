"""Traces of agents, whose events form a tree -> the conversations in them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch_collate_kit._checks import type_name
from torch_collate_kit.errors import DataError

_PARENTS = {"parentUuid": "uuid", "parentId": "id"}  # Claude Code, pi


def trace_paths(events: Iterable[Any]) -> list[list[Any]]:
    """Return the paths of a trace: each last event with those before it, in order of the file.

    Args:
        events: the lines of a trace as mappings, with ``uuid`` and ``parentUuid``, or ``id`` and
            ``parentId``. Events of a side chain (``isSidechain``) are left out; those without a
            parent key belong to every path. Results of calls that one answer makes at once
            (Claude Code writes each beside the next call) are all in its path.

    Returns a list of paths. An answer that an earlier path has, or that is an error of the provider
    (``isApiErrorMessage``), gets ``train: False`` in a copy of its message, so that each answer is
    trained once; other events are those given.

    Raises:
        DataError: an event is no mapping, two have one id, a parent is missing, or an event is its
            own ancestor. The message names the event.
        TypeError: events that are not iterable.

    >>> asked = {"uuid": "1", "parentUuid": None, "message": {"role": "user", "content": "Hi"}}
    >>> answers = [
    ...     {"uuid": n, "parentUuid": "1", "message": {"role": "assistant", "content": n}}
    ...     for n in ("2", "3")
    ... ]
    >>> [[event["message"]["content"] for event in path] for path in trace_paths([asked, *answers])]
    [['Hi', '2'], ['Hi', '3']]
    """
    if not isinstance(events, Iterable):
        raise TypeError(f"events is {type_name(events)}; pass the lines of a trace, each a mapping")
    events = list(events)
    parents: dict[Any, Any] = {}  # of the events with a place in the tree
    own: list[Any] = []
    for i, event in enumerate(events):
        if not isinstance(event, Mapping):
            raise DataError(f"event {i} is {event!r:.40}; give each line of the trace as a mapping")
        key = next((key for key in _PARENTS if key in event), None)
        is_side = bool(event.get("isSidechain"))
        own.append(... if is_side else None if key is None else event.get(_PARENTS[key]))
        if key is not None and not is_side:
            if own[i] is None or not isinstance(own[i], Hashable) or own[i] in parents:
                raise DataError(f"event {i} has {_PARENTS[key]} {own[i]!r}; each needs its own")
            parents[own[i]] = event[key]
    for i, place in enumerate(own):
        parent = parents.get(place)
        if parent is not None and (not isinstance(parent, Hashable) or parent not in parents):
            raise DataError(f"event {i} has the parent {parent!r}, which is missing in the trace")
    _chain_results(events, own, parents)
    paths, known, with_children = [], set[Any](), {*parents.values()}
    is_tree = bool(parents) or None not in own
    for leaf in [place for place in parents if place not in with_children] if is_tree else [None]:
        line, place = set[Any]([None]), leaf
        while place not in line:
            line.add(place)
            place = parents[place]
        if place is None:  # else it is its own ancestor
            pairs = zip(events, own, strict=True)
            paths.append([_marked(event, i in known) for event, i in pairs if i in line])
            known |= line
    if left := parents.keys() - known:
        first = next(i for i, place in enumerate(own) if place in left)
        raise DataError(f"event {first} is its own ancestor, or follows one; repair its parent")
    return paths


def _chain_results(
    events: Sequence[Mapping[str, Any]], own: Sequence[Any], parents: dict[Any, Any]
) -> None:
    """Let the results of an answer's calls follow its last event, one after the other.

    Claude Code writes an answer of several calls as several events, each the child of the one
    before, and the result of a call as a child of the call, beside the next one. Events without a
    role, such as those of progress, may stand between them.
    """
    answers: dict[Any, list[Any]] = {}  # first event of an answer -> its events
    results: dict[Any, list[tuple[Any, list[Any]]]] = {}  # -> those of results, with their calls
    first_of: dict[Any, Any] = {}
    silent: dict[Any, Any] = {}  # events without a role -> the last one before with a role
    spoken: dict[Any, Any] = {}  # events -> the last one before with a role
    children: dict[Any, list[Any]] = {}
    for place, parent in parents.items():
        children.setdefault(parent, []).append(place)
    for event, place in zip(events, own, strict=True):
        message = event.get("message", event)
        if place not in parents:
            continue
        parent = spoken[place] = silent.get(parents[place], parents[place])
        if not isinstance(message, Mapping) or "role" not in message:
            silent[place] = parent
            continue
        content = message.get("content")
        listed = content if isinstance(content, list) else []
        parts = [part for part in listed if isinstance(part, Mapping)]
        calls = [part.get("tool_use_id") for part in parts if part.get("type") == "tool_result"]
        if message.get("role") == "assistant":
            first_of[place] = first_of.get(parent, place)
            answers.setdefault(first_of[place], []).append(place)
        elif calls and parent in first_of:
            results.setdefault(first_of[parent], []).append((place, calls))
    for first, found in results.items():
        answer, calls = answers[first], [call for _, of in found for call in of]
        is_line = all(spoken[after] == before for before, after in pairwise(answer))
        if is_line and len({*map(str, calls)}) == len(calls):  # else a call was done anew: branches
            chain = [answer[-1], *(place for place, _ in found)]
            for result in chain[1:-1]:
                parents.update(dict.fromkeys(children.get(result, []), chain[-1]))
            parents.update(zip(chain[1:], chain, strict=False))


def _marked(event: Any, is_known: bool) -> Any:
    message = event.get("message", event)
    is_answer = isinstance(message, Mapping) and message.get("role") == "assistant"
    if not is_answer or not (is_known or event.get("isApiErrorMessage")):
        return event
    marked = {**message, "train": False}
    return marked if message is event else {**event, "message": marked}
