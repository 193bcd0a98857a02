"""What checks look at: the tokens of all rows in one flat column, and what is trained of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from torch_collate_kit.reporting.audit.findings import Severity
from torch_collate_kit.reporting.audit.vocabulary import Vocabulary

__all__ = ["AuditColumns", "Found", "RolloutColumns"]


@dataclass(frozen=True)
class RolloutColumns:
    """What rollouts have in addition. Legend: N rows, A response tokens of all rows."""

    num_actions: np.ndarray
    """int64 [N], response tokens per row."""
    weights: np.ndarray
    """float32 or bool [A], the loss mask."""
    scores: np.ndarray
    """float64 [N], the sum of the rewards of each row."""
    logprobs: np.ndarray | None = None
    """float32 [A]."""
    uids: list[Hashable] | None = None
    is_last_step: np.ndarray | None = None
    """bool [N]."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [N + 1], where the response of each row begins among the A."""
        return np.append(0, np.cumsum(self.num_actions))


@dataclass(frozen=True)
class Found:
    """What a check found: rows by their place in the columns, and the tokens that show it."""

    rows: np.ndarray
    place: tuple[int, int] | None = None
    """First token and last + 1 of an example, in the first row; None: its whole text."""
    severity: Severity | None = None
    """Where it differs from that of the message."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the message has in addition to the counts."""
    example: str | None = None
    """Where it is no text of a row."""


@dataclass(frozen=True)
class AuditColumns:
    """Rows of tokens, flat. Legend: N rows, T tokens of all rows."""

    numbers: np.ndarray
    """int64 [N], which row of the user's data each one is of."""
    ids: np.ndarray
    """Integers [T]."""
    lengths: np.ndarray
    """int64 [N], 1 or more."""
    trained: np.ndarray
    """bool [T], as collators see it: the first token of a row is not trained."""
    has_target: bool
    """Whether the rows say what is trained."""
    labels: np.ndarray | None = None
    """Integers [T], where labels are what says it."""
    rollouts: RolloutColumns | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    max_tokens: int | None = None
    has_image: np.ndarray | None = None
    """bool [N], rows with images, of which text alone does not say whether they are equal."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [N + 1], where each row begins."""
        return np.append(0, np.cumsum(self.lengths))

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [N], the first token of each row."""
        return self.offsets[:-1]

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [N], the last token of each row, + 1."""
        return self.offsets[1:]

    @cached_property
    def num_trained(self) -> np.ndarray:
        """int64 [N], trained tokens per row."""
        return np.add.reduceat(self.trained, self.starts, dtype=np.int64)

    @cached_property
    def trained_places(self) -> np.ndarray:
        """int64, which of the T tokens are trained."""
        return np.flatnonzero(self.trained)

    @cached_property
    def first_trained(self) -> np.ndarray:
        """int64 [N], the first trained token of each row, among the T; -1 where there is none."""
        return self._trained_place(np.cumsum(self.num_trained) - self.num_trained)

    @cached_property
    def last_trained(self) -> np.ndarray:
        """int64 [N], the last trained token of each row, among the T; -1 where there is none."""
        return self._trained_place(np.cumsum(self.num_trained) - 1)

    def _trained_place(self, which: np.ndarray) -> np.ndarray:
        if not len(self.trained_places):
            return np.full_like(self.lengths, -1)
        places = self.trained_places[np.minimum(which, len(self.trained_places) - 1)]
        return np.where(self.num_trained > 0, places, -1)

    @cached_property
    def is_fully_trained(self) -> np.ndarray:
        """bool [N], rows of two tokens or more of which all but the first are trained."""
        return (self.num_trained == self.lengths - 1) & (self.lengths > 1)

    @cached_property
    def is_end(self) -> np.ndarray:
        """bool [T], tokens that end an answer."""
        found = np.zeros(len(self.ids), dtype=np.bool_)
        for token in self.vocabulary.end_ids:
            found |= self.ids == token
        return found

    @cached_property
    def trains_end(self) -> bool:
        """Whether any row trains a token that ends an answer."""
        targets = self.ids if self.labels is None else self.labels
        return bool(np.isin(targets[self.trained_places], self.vocabulary.end_ids).any())

    @cached_property
    def headers(self) -> np.ndarray:
        """int64, the first tokens of generation prompts, which begin a turn of the assistant."""
        return self.places_of(self.vocabulary.header_ids)

    @cached_property
    def headers_of_turns(self) -> np.ndarray:
        """int64, ``headers`` without those that the model writes after its thinking, as gpt-oss."""
        if not self.vocabulary.repeats_header:
            return self.headers
        begins_row = np.isin(self.headers, self.starts)
        return self.headers[begins_row | ~self.trained[self.headers - 1]]

    def places_of(self, pattern: tuple[int, ...]) -> np.ndarray:
        """int64, the tokens at which these ids begin, all in one row."""
        if not pattern or len(pattern) > len(self.ids):
            return np.empty(0, dtype=np.int64)
        places = np.flatnonzero(self.ids[: len(self.ids) - len(pattern) + 1] == pattern[0])
        for i, token in enumerate(pattern[1:], start=1):
            places = places[self.ids[places + i] == token]
        return places[self.rows_of(places) == self.rows_of(places + len(pattern) - 1)]

    def rows_of(self, places: np.ndarray) -> np.ndarray:
        """int64, the row of each of these tokens."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def found_at(self, places: np.ndarray, width: int = 1, **values: Any) -> Found | None:
        """The rows of these tokens, which must be in order, with the first as the example."""
        if not len(places):
            return None
        first = int(places[0])
        return Found(np.unique(self.rows_of(places)), (first, first + width), values=values)

    def found_in(self, is_found: np.ndarray, **values: Any) -> Found | None:
        """The rows where ``is_found``, bool [N], is True."""
        rows = np.flatnonzero(is_found)
        return Found(rows, values=values) if len(rows) else None
