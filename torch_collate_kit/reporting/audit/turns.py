"""The turns in rows of tokens, found by the headers that the chat template writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch_collate_kit.reporting.audit.columns import AuditColumns

_MARKUP = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]+\]")
_FURTHEST = 5  # tokens that a mask is moved by
_LONGEST_GAP = 48  # tokens; what a prompt adds to the header is shorter
_MOST = 0.5


@dataclass(frozen=True)
class Turns:
    """Turns of all rows in order, as tokens among the T of ``columns``. Legend: M turns.

    A turn is its header, its text from ``begins`` on, the token that ends it, and what the template
    writes before the next header.
    """

    columns: AuditColumns
    starts: np.ndarray
    """int64 [M], the first token of each header."""
    begins: np.ndarray
    """int64 [M], the first token after each header."""
    kinds: np.ndarray
    """int64 [M], the number of its header in ``Vocabulary.role_ids``."""
    are_answers: np.ndarray
    """bool [M]."""

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [M], the row of each turn."""
        return self.columns.rows_of(self.starts)

    @cached_property
    def limits(self) -> np.ndarray:
        """int64 [M], the next header, or the end of the row."""
        following = np.append(self.starts[1:], len(self.columns.ids))
        return np.minimum(following, self.columns.ends[self.rows])

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [M], the token that ends each text, which may begin the next header; or -1."""
        places = np.flatnonzero(self.columns.is_end)
        if not len(places):
            return np.full(len(self.starts), -1)
        which = np.searchsorted(places, self.begins)
        found = places[np.minimum(which, len(places) - 1)]
        is_inside = (which < len(places)) & (found < np.minimum(self.limits + 1, self.row_ends))
        return np.where(is_inside, found, -1)

    @cached_property
    def stops(self) -> np.ndarray:
        """int64 [M], the end of each text, + 1: after its end token, or before the next header."""
        return np.where(self.ends >= 0, self.ends + 1, self.limits)

    @cached_property
    def text_stops(self) -> np.ndarray:
        """int64 [M], the end of each text, without its end token."""
        return np.where(self.ends >= 0, self.ends, self.limits)

    def holding(self, places: np.ndarray) -> np.ndarray:
        """Return the turn whose text, without header and end, holds each of these tokens; or -1."""
        which = np.searchsorted(self.starts, places, side="right") - 1
        if not len(self.starts):
            return which
        is_inside = (self.begins[which] <= places) & (places < self.text_stops[which])
        return np.where((which >= 0) & is_inside, which, -1)

    @cached_property
    def row_ends(self) -> np.ndarray:
        """int64 [M], the end of the row of each turn."""
        return self.columns.ends[self.rows]

    @cached_property
    def is_set_aside(self) -> np.ndarray:
        """Turns in rows that another finding explains: bool [M]."""
        return self.columns.is_set_aside[self.rows]

    @cached_property
    def shifts(self) -> np.ndarray:
        """int64 [M], tokens by which a mask is late at both ends, below 0 early; else 0."""
        columns, trained = self.columns, self.columns.trained
        by = np.zeros(len(self.starts), dtype=np.int64)
        num_trained = columns.num_trained_in(self.expected, self.ends + 1)
        is_odd = (
            self.are_answers & (self.ends >= 0) & (num_trained != self.ends + 1 - self.expected)
        )
        which = np.flatnonzero(is_odd & ~np.logical_or(*columns.shifted_labels)[self.rows])
        starts, ends, limits = (of[which] for of in (self.expected, self.ends, self.row_ends))
        for distance in (*range(1, _FURTHEST + 1), *range(-1, -_FURTHEST - 1, -1)):
            begins, stops = starts + distance, np.minimum(ends + 1 + distance, limits)
            fits = (begins < stops) & (begins > columns.starts[self.rows[which]])
            fits &= (distance < 0) | (stops > ends + 1)
            at, to = np.where(fits, begins, 0), np.where(fits, stops, 1)
            fits &= trained[at] & ~trained[at - 1] & (columns.num_trained_in(at, to) == to - at)
            fits &= (to == limits) | ~trained[np.minimum(to, len(trained) - 1)]
            fits &= by[which] == 0
            if fits.any():
                is_other = np.isin(begins[fits], self.expected)  # the answer of another turn
                by[which[fits][~is_other]] = distance
        return by

    @cached_property
    def expected(self) -> np.ndarray:
        """int64 [M], the first token of an answer that should be trained.

        Before it are the rest of the generation prompt, or tags that most answers leave out.
        """
        columns, vocabulary = self.columns, self.columns.vocabulary
        rest = vocabulary.prompt_ids[len(vocabulary.header_ids) :]
        width, is_prompted = len(rest), self.begins + len(rest) <= self.limits
        for i, token in enumerate(rest):
            is_prompted &= columns.ids[np.minimum(self.begins + i, len(columns.ids) - 1)] == token
        gaps = columns.next_trained(self.begins) - self.begins
        is_trained = self.are_answers & (gaps < self.stops - self.begins)
        if is_trained.any():
            usual = int(np.bincount(np.minimum(gaps[is_trained], _LONGEST_GAP + 1)).argmax())
            like = self.begins[is_trained & (gaps == usual)]
            is_usual = len(like) > _MOST * is_trained.sum()
            if is_usual and self.is_markup(int(like[0]), int(like[0]) + usual):
                is_prompted, width = self.begins + usual <= self.limits, usual
        return np.where(is_prompted, self.begins + width, self.begins)

    def is_markup(self, start: int, stop: int) -> bool:
        """Whether these tokens are white space and tags alone."""
        if stop - start > _LONGEST_GAP:
            return False
        return not _MARKUP.sub("", self.columns.text(start, stop)).strip()


def turns_of(columns: AuditColumns) -> Turns:
    """Find the turns of rows; none without a template that begins answers with an added token."""
    none = np.empty(0, dtype=np.int64)
    starts, widths, kinds = [none], [none], [none]
    names = columns.vocabulary.role_ids
    for kind, (ids, role) in enumerate(names.items()):
        places = columns.places_of(ids)
        starts.append(columns.without_repeated(places) if role == "assistant" else places)
        widths.append(np.full_like(starts[-1], len(ids)))
        kinds.append(np.full_like(starts[-1], kind))
    found = np.stack([np.concatenate(of) for of in (starts, widths, kinds)])
    found = found[:, np.lexsort((-found[1], found[0]))]  # of headers at one place the longest
    stops = np.maximum.accumulate(np.append(-1, found[0] + found[1]))
    first, width, kind = found[:, found[0] >= stops[:-1]]
    are_answers = np.array([role == "assistant" for role in names.values()], dtype=np.bool_)
    return Turns(columns, first, first + width, kind, are_answers[kind])
