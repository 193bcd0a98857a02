"""How a run was divided over ranks, from which step on: what a state says of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.sampler.arguments import is_same

__all__ = ["Layouts"]

_MOST = 50  # entries; about 30 bytes each in a state
_MOST_BYTES = 2000  # of them in a state, where many settings change as well
_MAX_COUNT = 2**32 - 1


class _Entry(NamedTuple):
    epoch: int
    step: int
    settings: dict[str, Any]

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.step


class Layouts:
    """The settings that may change from resume to resume, such as the number of ranks.

    An entry holds all settings from its position on; in a state, those that its step has changed.

    >>> layouts = Layouts({"world_size": 8})
    >>> layouts.change((0, 340), {"world_size": 6})
    {'world_size': 8}
    >>> layouts.at((0, 339)), layouts.at((2, 0))
    ({'world_size': 8}, {'world_size': 6})
    >>> layouts.until((0, 400))
    [[0, 0, {'world_size': 8}], [0, 340, {'world_size': 6}]]
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._entries = [_Entry(0, 0, dict(settings))]

    @classmethod
    def of(cls, entries: Any, position: tuple[int, int], like: Mapping[str, Any]) -> Layouts:
        """From the entries of a state of this position, of settings ``like`` these.

        Raises:
            StateError: they are not that.
        """
        _check_entries(entries, position, like)
        layouts = cls({})
        layouts._entries, settings = [], dict.fromkeys(like)
        for epoch, step, changed in entries:
            settings = {**settings, **changed}
            layouts._entries.append(_Entry(epoch, step, settings))
        return layouts

    @property
    def first(self) -> tuple[int, int]:
        """The earliest position that is known."""
        return self._entries[0].position

    def at(self, position: tuple[int, int]) -> dict[str, Any]:
        """The settings of a step; StateError if they are no longer known."""
        if position < self.first:
            raise StateError(
                f"the layout of epoch {position[0]} step {position[1]} is not known: a state keeps "
                f"the last {_MOST} changes of it at most, back to epoch {self.first[0]} step "
                f"{self.first[1]}; its examples are known without a rank"
            )
        return next(e.settings for e in reversed(self._entries) if e.position <= position)

    def check(self, make: Callable[[dict[str, Any]], object]) -> None:
        """StateError for settings that ``make`` refuses."""
        for entry in self._entries:
            try:
                make(entry.settings)
            except (TypeError, ValueError, OverflowError) as error:
                raise StateError(
                    f"state has a layout of epoch {entry.epoch} step {entry.step} that no run can "
                    f"have had: {error}; pass what state_dict() gave"
                ) from error

    def change(self, position: tuple[int, int], settings: Mapping[str, Any]) -> dict[str, Any]:
        """These settings from ``position`` on, and nothing after; what other values were there."""
        before = self._entries[0].settings
        if position >= self.first:
            before = self.at(position)
        self._entries = [e for e in self._entries if e.position < position]
        if not self._entries or not is_same(self._entries[-1].settings, dict(settings)):
            self._entries = [*self._entries, _Entry(*position, dict(settings))][-_MOST:]
        return {k: v for k, v in before.items() if not is_same(v, settings.get(k))}

    def until(self, position: tuple[int, int]) -> list[list[Any]]:
        """The entries up to a position, for a state of it: JSON."""
        self.at(position)  # that it is known
        known = [entry for entry in self._entries if entry.position <= position]
        while len(json.dumps(found := self._as_changes(known))) > _MOST_BYTES and len(known) > 1:
            known = known[1:]
        return found

    def _as_changes(self, known: list[_Entry]) -> list[list[Any]]:
        entries: list[list[Any]] = []
        before: dict[str, Any] = {}
        for entry in known:
            changed = {
                k: v
                for k, v in entry.settings.items()
                if k not in before or not is_same(v, before[k])
            }
            entries.append([entry.epoch, entry.step, changed])
            before = entry.settings
        return entries


def _check_entries(entries: Any, position: tuple[int, int], like: Mapping[str, Any]) -> None:
    positions: list[tuple[int, ...]] = []
    num_ranks = None
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise _damaged(entries)
        *at, changed = entry
        if not all(type(n) is int and 0 <= n <= _MAX_COUNT for n in at):
            raise _damaged(entries)
        if not isinstance(changed, dict) or not changed.keys() <= like.keys():
            raise _damaged(entries)
        if not positions and changed.keys() != like.keys():  # the first entry has all settings
            raise _damaged(entries)
        num_ranks = changed.get("world_size", changed.get("dp", num_ranks))
        if type(num_ranks) is not int or not 1 <= num_ranks <= _MAX_COUNT:
            raise _damaged(entries)
        positions.append(tuple(at))
    if not positions or positions != sorted(set(positions)) or positions[-1] > position:
        raise _damaged(entries)


def _damaged(entries: Any) -> StateError:
    return StateError(
        f"state has layouts={entries!r}, not a list of [epoch, step, settings] in order, none "
        "after its position; pass what state_dict() gave"
    )
