"""States of samplers: what they hold, what they must fit, and how a run goes on from them."""

from __future__ import annotations

import copy
import logging
from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.checks import (
    NEW_RUN,
    differences,
    is_same,
    sealed,
    unsealed,
)
from torch_collate_kit.loading.sampler.epochs import EpochSampler

_VERSION = 5
_logger = logging.getLogger("torch_collate_kit.loading")


class ResumingSampler(EpochSampler, ABC):
    """A batch sampler whose position is small JSON, which loads on any number of ranks."""

    def _layout(self) -> dict[str, Any]:
        """Return the settings that a resumed run may have otherwise, as JSON."""
        return {"dp_size": self._dp_size}

    def _check_layout(self, layout: dict[str, Any]) -> None:
        """Raise StateError if a run with the layout of a state cannot go on here."""

    def _fingerprint(self, num_examples: int) -> dict[str, Any]:
        """Return what is compared of the first so many examples, as JSON."""
        make = self._data_fingerprint
        return {"fingerprint": make(num_examples) if callable(make) else None}

    def _fits(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings that a state must share, for as many examples as ``like`` has."""
        number = self.num_examples
        if like is not None:
            number = self._order.num_known(like, allow_appended=self._allow_appended)
        if number not in self._fingerprints:
            self._fingerprints[number] = self._fingerprint(number)
        name, num_global = self._num_global
        own = {"tail": self._tail, "custom_order": self._user_order is not None}
        order = {name: num_global, "seed": self._seed, "shuffle": self._shuffle}
        fits = {**own, **order, **self._fingerprints[number]}
        if like is not None:
            fits["fingerprint"] = _known(fits["fingerprint"], like["fingerprint"])
        return fits

    def _extra(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a state holds besides its position and settings."""
        return {**self._order.state(epoch, step), **self._budget.state(epoch, step)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next ``iter()``; a consumer saves :meth:`state_at` instead."""
        return self._state_at(*self._position())  # does not ask for the length of the next epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps of ``epoch``, as small JSON.

        Raises:
            TypeError, ValueError: the epoch or the step is not an int or out of range.
        """
        epoch, step = self._checked_position(epoch, step)
        return self._state_at(epoch, step)

    def _state_at(self, epoch: int, step: int) -> dict[str, Any]:
        where = {"version": _VERSION, "epoch": epoch, "step": step}
        state = {**where, **self._extra(epoch, step), **self._fits(), "layout": self._layout()}
        return sealed(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where the state was saved, on any number of ranks.

        Every step has the examples that it would have had. How they are divided over ranks and
        packed into rows follows from this sampler's arguments; what differs is logged.

        Raises:
            StateError: the state is of another sampler, or no state; nothing has been changed.
        """
        other = copy.copy(self)
        before = other._load(state)
        vars(self).update(vars(other))
        now = self._layout().items()
        changed = [f"{k} {before[k]} -> {v}" for k, v in now if not is_same(v, before[k])]
        if changed:
            level = logging.WARNING if self._replans(before) else logging.INFO
            kept = "the same examples in each step" + (", other rows" if level > 20 else "")
            message = "resumed at epoch %d step %d with another layout (%s): %s"
            _logger.log(level, message, *self._position(), ", ".join(changed), kept)

    def _replans(self, before: Mapping[str, Any]) -> bool:
        """Return whether rows differ from those of another layout."""
        return False

    def _load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Restore a state that fits, and return the layout of its run."""
        state = unsealed(state, _VERSION)
        self._check_keys(state)
        epoch, step = state["epoch"], state["step"]
        self._check_fits(state, epoch, step)
        self._set_order(self._order.loaded(state, epoch, step))
        self._budget.load(state, epoch, step)
        if step and not self._budget.has_step(epoch, step):
            num_steps = self._num_steps(epoch)
            raise StateError(
                f"state is of step {step}, but epoch {epoch} has {num_steps} steps; {NEW_RUN}"
            )
        layout = state["layout"]
        self._check_layout(layout)
        self._epoch, self._step, self._latest = epoch, step, None
        return layout

    def _check_keys(self, state: Mapping[str, Any]) -> None:
        keys = {"version", "epoch", "step", "layout", *self._extra(0, 0), *self._fits()}
        if state.keys() != keys:
            missing, unknown = sorted(keys - state.keys()), sorted(map(str, state.keys() - keys))
            raise StateError(
                f"state of another kind: keys missing {missing}, unknown {unknown}; "
                f"pass what state_dict() of a {type(self).__name__} gave, in the same version of "
                "the library"
            )

    def _check_fits(self, state: Mapping[str, Any], epoch: int, step: int) -> None:
        """Check that a state of this position is of the same run."""
        fits = self._fits(like=state)
        state = {key: state[key] for key in fits}  # in the same order
        was, now = differences(state, fits), differences(fits, state)
        if was:
            raise StateError(f"state is of {was}, this sampler has {now}; {NEW_RUN}")


def _known(mine: Any, other: Any) -> Any:
    """Return my fingerprint; where either side does not know one, the other's."""
    if mine is None or other is None:
        return other
    own, others = (of.get("sources") if isinstance(of, dict) else None for of in (mine, other))
    if not isinstance(own, list) or not isinstance(others, list) or len(own) != len(others):
        return mine
    return {**mine, "sources": [_known(a, b) for a, b in zip(own, others, strict=True)]}
