"""What checks look at: the tokens of all rows in one flat column, and what is trained of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from torch_collate_kit.reporting.audit.findings import Severity
from torch_collate_kit.reporting.audit.vocabulary import Vocabulary

__all__ = ["AuditColumns", "Found", "Refused"]

_BEFORE, _AFTER, _LONGEST = 24, 12, 40  # tokens of an excerpt


@dataclass(frozen=True)
class Found:
    """What a check found."""

    rows: np.ndarray
    """int64, the numbers of the rows in the user's data, each once."""
    example: str = ""
    """One of them as text, with the place that shows it marked."""
    severity: Severity | None = None
    """Where it differs from that of the check."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the message has in addition to the counts."""
    num_rows: int | None = None
    """Of how many rows; None: of those that were read."""


@dataclass(frozen=True)
class Refused:
    """A row that no collator takes."""

    number: int
    message: str
    of_images: bool = False
    """Whether its text would be taken without its images."""


def _none(dtype: Any = np.int64) -> np.ndarray:
    return np.empty(0, dtype=dtype)


@dataclass(frozen=True)
class AuditColumns:
    """Rows of tokens, flat. Legend: N rows, T tokens of all rows."""

    numbers: np.ndarray = field(default_factory=_none)
    """int64 [N], which row of the user's data each one is of."""
    ids: np.ndarray = field(default_factory=_none)
    """Integers [T]."""
    lengths: np.ndarray = field(default_factory=_none)
    """int64 [N], 1 or more."""
    trained: np.ndarray = field(default_factory=lambda: _none(np.bool_))
    """bool [T], as collators see it: the first token of a row is not trained."""
    has_image: np.ndarray = field(default_factory=lambda: _none(np.bool_))
    """bool [N], rows with images, of which text alone does not say whether they are equal."""
    has_target: bool = False
    """Whether the rows say what is trained."""
    labels: np.ndarray | None = None
    """Integers [T], where labels are what says it."""

    num_actions: np.ndarray | None = None
    """int64 [N], response tokens per row, of rollouts; the columns below are of rollouts too."""
    scores: np.ndarray | None = None
    """float64 [N], the sum of the rewards of each row."""
    logprobs: np.ndarray | None = None
    """float32 [T], NaN where there is none: in prompts."""
    uids: np.ndarray | None = None
    """Objects [N]."""
    is_last_step: np.ndarray | None = None
    """bool [N]."""

    refused: Sequence[Refused] = ()
    """Rows that are not among the N, in order."""
    without_answer: np.ndarray = field(default_factory=_none)
    """int64, numbers of chat records that give no row, as nothing in them would be trained."""
    has_unread_images: bool = False
    """Whether there are images, and no processor that says how many tokens they take."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    max_tokens: int | None = None

    @property
    def are_rollouts(self) -> bool:
        """Whether the rows are prompts with responses."""
        return self.num_actions is not None

    @cached_property
    def num_read(self) -> int:
        """How many rows of the user's data were read."""
        return len(np.unique(self.numbers))

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
    def responses(self) -> np.ndarray:
        """int64 [N], the first token of each response."""
        assert self.num_actions is not None, "examples have no responses"
        return self.ends - self.num_actions

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
            return _none()
        places = np.flatnonzero(self.ids[: len(self.ids) - len(pattern) + 1] == pattern[0])
        for i, token in enumerate(pattern[1:], start=1):
            places = places[self.ids[places + i] == token]
        return places[self.rows_of(places) == self.rows_of(places + len(pattern) - 1)]

    def rows_of(self, places: np.ndarray | int) -> np.ndarray:
        """int64, the row of each of these tokens."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def found_at(self, places: np.ndarray, width: int = 1, **values: Any) -> Found | None:
        """The rows of these tokens, which must be in order; the first is shown, ``width`` wide."""
        if not len(places):
            return None
        rows = np.unique(self.numbers[self.rows_of(places)])
        return Found(rows, self.excerpt(int(places[0]), int(places[0]) + width), values=values)

    def found_in(
        self,
        is_found: np.ndarray,
        firsts: np.ndarray | None = None,
        stops: np.ndarray | None = None,
        *,
        severity: Severity | None = None,
        **values: Any,
    ) -> Found | None:
        """The rows where ``is_found``, bool [N], is True; the first is shown.

        ``firsts`` and ``stops``, int64 [N]: the first token that shows it in each row, and the last
        + 1. Without ``firsts`` it is the whole row, without ``stops`` the one token.
        """
        rows = np.flatnonzero(is_found)
        if not len(rows):
            return None
        row = rows[0]
        first, stop = self.offsets[row : row + 2].tolist()
        if firsts is not None:
            first = int(firsts[row])
            stop = first + 1 if stops is None else int(stops[row])
        example = self.excerpt(first, stop)
        return Found(np.unique(self.numbers[rows]), example, severity, values)

    def excerpt(self, start: int, stop: int) -> str:
        """These tokens between double brackets, within their row; long texts are cut short."""
        row = int(self.rows_of(start))
        begin, end = self.offsets[row : row + 2].tolist()
        stop = min(stop, end)
        first, last = max(begin, start - _BEFORE), min(end, stop + _AFTER)
        shown = min(stop, start + _LONGEST)
        if shown < stop:
            last = shown
        before, marked, after = (
            self.vocabulary.text(self.ids[a:b].tolist())
            for a, b in ((first, start), (start, shown), (shown, last))
        )
        sides = "... " if first > begin else "", " ..." if last < end else ""
        text = f"{sides[0]}{before} \u27e6{marked}\u27e7 {after}{sides[1]}".strip()
        return f"row {self.numbers[row]}: {' '.join(text.split())}"
