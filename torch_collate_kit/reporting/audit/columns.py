"""Tokens of all rows in one flat column, which of them are trained, and their turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.reporting.audit.findings import Found, Refused, Severity, words_of
from torch_collate_kit.reporting.audit.vocabulary import Vocabulary

_BEFORE, _AFTER, _LONGEST = 24, 12, 40  # tokens of an excerpt
_AGREE, _DISAGREE, _LEAST_LABELS = 0.9, 0.5, 2  # of the labels of a row that are shifted
_LEAST_CHANCE, _CERTAIN = 0.01, 1e-6  # of a zero, at least; that values are equal by chance
_AT_A_TIME = 1 << 17  # tokens
_MARKUP = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]+\]")
_FURTHEST = 5  # tokens that a mask is moved by
_LONGEST_GAP = 48  # tokens; what a prompt adds to the header is shorter
_MOST = 0.5
_INTS, _FLOATS, _BOOLS = (partial(np.empty, 0, dtype=of) for of in (np.int64, np.float64, np.bool_))


@dataclass(frozen=True)
class AuditColumns:
    """Rows of tokens, flat. Legend: N rows, T tokens of all rows."""

    numbers: np.ndarray = field(default_factory=_INTS)
    """int64 [N], the number of each row in the user's data."""
    ids: np.ndarray = field(default_factory=_INTS)  # integers [T]
    lengths: np.ndarray = field(default_factory=_INTS)  # int64 [N], 1 or more
    trained: np.ndarray = field(default_factory=_BOOLS)
    """bool [T], trained tokens; never the first of a row, as for collators."""
    has_image: np.ndarray = field(default_factory=_BOOLS)
    """bool [N], rows with images; equal text does not make them equal."""
    num_cut: np.ndarray = field(default_factory=_INTS)
    """int64 [N], tokens that each row had lost before the audit."""
    is_continued: np.ndarray = field(default_factory=_INTS)
    """int64 [N], 1 for windows that end inside an answer, of which another one has the end."""
    has_target: bool = False  # whether the rows say what is trained
    labels: np.ndarray = field(default_factory=_INTS)
    """integers [T], where the target is given as labels; else empty."""
    segments: np.ndarray = field(default_factory=_INTS)
    """int64 [N], which segment of its example each row is; empty for examples of one each."""
    margins: np.ndarray = field(default_factory=_FLOATS)
    """float64 [N], by how much the chosen side is better, NaN if unknown; empty as above."""
    num_actions: np.ndarray = field(default_factory=_INTS)
    """int64 [N], response tokens per rollout; it and the next are empty for examples."""
    scores: np.ndarray = field(default_factory=_FLOATS)
    """float64 [N], the sum of the rewards of each row."""
    is_last_step: np.ndarray = field(default_factory=_BOOLS)
    """bool [N], the last step of each trajectory."""
    logprobs: np.ndarray = field(default_factory=partial(np.empty, 0, dtype=np.float32))
    """float32 [T], NaN in prompts; empty if rollouts have no log-probs."""
    uids: np.ndarray = field(default_factory=_INTS)
    """int64 [N], a number for each uid; empty if rollouts have none."""
    refused: Sequence[Refused] = ()  # rows that the readers refused, in order; not among the N
    without_answer: np.ndarray = field(default_factory=_INTS)
    """int64, numbers of chat records without a row, as nothing in them would be trained."""
    forged: np.ndarray = field(default_factory=_INTS)
    """int64, numbers of chat records with a message that has a token that begins or ends turns."""
    are_labelled: bool = False  # whether examples have a label (KTO): their segments are not pairs
    has_unread_images: bool = False  # images, and no processor that says how many tokens they take
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    max_tokens: int | None = None
    classes: np.ndarray = field(default_factory=_FLOATS)  # all labels, or of examples
    targets: TargetKind = "next_token"

    @property
    def are_rollouts(self) -> bool:
        """Whether the rows are prompts with responses."""
        return len(self.num_actions) > 0

    @cached_property
    def num_read(self) -> int:
        """Number of rows of the user's data that were read."""
        return len(np.unique(self.numbers))

    @cached_property
    def heads(self) -> np.ndarray:
        """int64, the row with which each example begins."""
        return np.flatnonzero(self.segments == 0 if len(self.segments) else self.lengths)

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [N + 1], the first token of each row, and T."""
        return np.append(0, np.cumsum(self.lengths))

    @property
    def starts(self) -> np.ndarray:
        """int64 [N], the first token of each row."""
        return self.offsets[:-1]

    @property
    def ends(self) -> np.ndarray:
        """int64 [N], the last token of each row, + 1."""
        return self.offsets[1:]

    @cached_property
    def responses(self) -> np.ndarray:
        """int64 [N], the first token of each response."""
        return self.ends - self.num_actions

    @cached_property
    def trained_places(self) -> np.ndarray:
        """int64, the trained tokens among the T."""
        return np.flatnonzero(self.trained)

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 each: the first token of every run of trained tokens, the last + 1, tokens before.

        They are far fewer than trained tokens.
        """
        edges = np.flatnonzero(np.diff(self.trained, prepend=False, append=False))
        begins, stops = edges[::2], edges[1::2]
        return begins, stops, np.append(0, np.cumsum(stops - begins))

    def num_trained_in(self, begins: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return how many tokens from ``begins`` to ``stops`` are trained."""
        firsts, lasts, counts = self.runs

        def num_before(places: np.ndarray) -> Any:
            run = np.searchsorted(firsts, places)
            return counts[run] - np.maximum(np.append(0, lasts)[run] - places, 0)

        return np.asarray(num_before(stops) - num_before(begins))

    def next_trained(self, places: np.ndarray) -> np.ndarray:
        """Return the first trained token at or after each place; T without one."""
        firsts, stops = (np.append(places, len(self.ids)) for places in self.runs[:2])
        run = np.minimum(np.searchsorted(stops, places, side="right"), len(firsts) - 1)
        found: np.ndarray = np.maximum(firsts[run], places)
        return found

    def last_trained_before(self, stops: np.ndarray) -> np.ndarray:
        """Return the last trained token before each place; -1 without one."""
        begins, ends, _ = self.runs
        found: np.ndarray = np.minimum(np.append(0, ends)[np.searchsorted(begins, stops)], stops)
        return found - 1

    @cached_property
    def num_trained(self) -> np.ndarray:
        """int64 [N], trained tokens per row."""
        return self.num_trained_in(self.starts, self.ends)

    @cached_property
    def first_trained(self) -> np.ndarray:
        """int64 [N], the first trained token of each row, among the T; -1 without one."""
        return np.where(self.num_trained > 0, self.next_trained(self.starts), -1)

    @cached_property
    def last_trained(self) -> np.ndarray:
        """int64 [N], the last trained token of each row, among the T; -1 without one."""
        return np.where(self.num_trained > 0, self.last_trained_before(self.ends), -1)

    @cached_property
    def is_fully_trained(self) -> np.ndarray:
        """Rows of two or more tokens that train all but the first: bool [N]."""
        return (self.num_trained == self.lengths - 1) & (self.lengths > 1)

    @cached_property
    def other_labels(self) -> np.ndarray:
        """int64, tokens with a label that is another id."""
        return np.flatnonzero(len(self.labels) and self.trained & (self.labels != self.ids))

    @cached_property
    def shifted_labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows whose labels are the next tokens, and those before: bool [N] each."""
        num_other = np.bincount(self.rows_of(self.other_labels), minlength=len(self.lengths))
        is_other = num_other > (1 - _DISAGREE) * self.num_trained
        if not is_other.any():  # the usual case, in one pass
            return is_other, is_other
        is_other &= self.num_trained >= _LEAST_LABELS
        has_next = self.trained.copy()
        has_next[self.ends - 1] = False  # the first token of a row is not trained

        def is_shifted(shift: int, is_counted: np.ndarray) -> np.ndarray:
            is_same = is_counted & (self.labels == np.roll(self.ids, -shift))
            counts, same = (
                np.add.reduceat(flags, self.starts, dtype=np.int64)
                for flags in (is_counted, is_same)
            )
            return is_other & (same >= _AGREE * np.maximum(counts, 1))

        return is_shifted(1, has_next), is_shifted(-1, self.trained)

    @cached_property
    def has_one_logprob(self) -> np.ndarray:
        """Rows whose trained tokens have one value, which chance does not explain: bool [N]."""
        values, counts = self.logprobs[self.trained_places], self.num_trained
        is_first = values == np.repeat(self.logprobs[self.first_trained], counts)
        num_first = np.append(0, np.cumsum(is_first))
        stops = np.cumsum(counts)
        found = (num_first[stops] - num_first[stops - counts] == counts) & (counts > 1)
        others = values[~np.repeat(found, counts)]
        rate = max(float((others == 0).mean()) if len(others) else 0.0, _LEAST_CHANCE)
        return found & (rate ** np.minimum(counts, 1000) <= _CERTAIN)

    @cached_property
    def are_classes(self) -> bool:
        """Whether the target of each row is its last token, from a few that do not end answers."""
        is_last = self.has_target and np.array_equal(self.trained_places, self.ends - 1)
        return is_last and 1 < len(np.unique(self.ids[self.ends - 1])) <= len(self.ends) / 3

    @cached_property
    def is_set_aside(self) -> np.ndarray:
        """Rows with another explanation, trained as a whole, shifted or classes: bool [N]."""
        others = self.is_fully_trained | self.are_classes
        return self.has_shift | others | np.logical_or(*self.shifted_labels)

    @cached_property
    def has_shift(self) -> np.ndarray:
        """Rows with an answer whose mask is shifted: bool [N]."""
        return self.in_rows(self.turns.rows[self.turns.shifts != 0])

    @cached_property
    def is_end(self) -> np.ndarray:
        """Tokens that end an answer: bool [T]."""
        found = np.zeros(len(self.ids), dtype=np.bool_)
        for token in self.vocabulary.end_ids:
            found[self.places_of_id(token)] = True
        return found

    @cached_property
    def turns(self) -> Turns:
        """Turns of all roles."""
        return turns_of(self)

    @cached_property
    def headers_of_turns(self) -> np.ndarray:
        """int64, headers before answers; not those that follow thinking (gpt-oss)."""
        return self.without_repeated(self.places_of(self.vocabulary.header_ids))

    def without_repeated(self, headers: np.ndarray) -> np.ndarray:
        """Return the headers that the model does not write itself."""
        if not self.vocabulary.repeats_header:
            return headers
        return headers[self.begins_row(headers) | ~self.trained[headers - 1]]

    def places_of(self, *patterns: tuple[int, ...]) -> np.ndarray:
        """Return the tokens, int64, at which one of these runs of ids begins, all in one row."""
        found = [np.empty(0, dtype=np.int64)]
        for pattern in patterns:
            if not pattern or len(pattern) > len(self.ids):
                continue
            places = self.places_of_id(pattern[0])
            places = places[: np.searchsorted(places, len(self.ids) - len(pattern) + 1)]
            for i, token in enumerate(pattern[1:], start=1):
                places = places[self.ids[places + i] == token]
            found.append(places[self.rows_of(places) == self.rows_of(places + len(pattern) - 1)])
        return np.unique(np.concatenate(found)) if len(found) > 2 else found[-1]

    def places_of_id(self, token: int) -> np.ndarray:
        """Return the tokens, int64, with this id; they are looked up once."""
        if token not in self._places:
            self._places[token] = np.flatnonzero(self.ids == token)
        return self._places[token]

    def places_of_ids(self, tokens: Iterable[int]) -> np.ndarray:
        """Return the tokens, int64, with any of these ids."""
        wanted = np.array([token for token in tokens if token >= 0], dtype=np.int64)
        is_wanted = np.zeros(int(wanted.max(initial=0)) + 2, dtype=np.bool_)  # the last: any larger
        is_wanted[wanted] = True
        found = [np.empty(0, dtype=np.bool_)]
        for start in range(0, len(self.ids), _AT_A_TIME):  # copied, so a part stays in the cache
            found.append(is_wanted.take(self.ids[start : start + _AT_A_TIME], mode="clip"))
        return np.flatnonzero(np.concatenate(found))

    @cached_property
    def _places(self) -> dict[int, np.ndarray]:
        return {}

    def equal_spans(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the number of the first span with the same ids as each span."""
        known: dict[bytes, int] = {}  # faster than hashes of whole columns, but for very short ones
        ids, spans = self.ids, zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        firsts = (known.setdefault(ids[a:b].tobytes(), i) for i, (a, b) in enumerate(spans))
        return np.fromiter(firsts, dtype=np.int64, count=len(starts))

    def begins_row(self, places: np.ndarray) -> np.ndarray:
        """Return whether each of these tokens is the first of its row."""
        found: np.ndarray = self.starts[self.rows_of(places)] == places
        return found

    def rows_of(self, places: np.ndarray | int) -> np.ndarray:
        """Return the row of each of these tokens, int64."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def share_of(self, rows: np.ndarray) -> float:
        """Return the number of these rows, each counted once, per row with a target."""
        return len(np.unique(rows)) / max(int((self.num_trained > 0).sum()), 1)

    def in_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return whether each row is among ``rows``: bool [N]."""
        return np.bincount(rows, minlength=len(self.lengths)) > 0

    def found_at(
        self,
        places: np.ndarray,
        message: str,
        width: int | np.ndarray = 1,
        *,
        severity: Severity | None = None,
    ) -> Found | None:
        """Return the rows of these tokens, in order; the first one is shown, ``width`` wide."""
        if not len(places):
            return None
        rows, first = self.rows_of(places), int(places[0])
        example = self.excerpt(first, first + int(np.ravel(width)[0]))
        share = self.share_of(rows)
        return Found(np.unique(self.numbers[rows]), message, example, severity, share=share)

    def found_by(self, kinds: Mapping[str, np.ndarray], message: str) -> Found | None:
        """Return the rows of several kinds of tokens; WHAT in the message names the kinds."""
        places = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *kinds.values()]))
        return self.found_at(places, message.replace("WHAT", words_of(kinds)))

    def found_in(
        self, is_found: np.ndarray, message: str, *, severity: Severity | None = None
    ) -> Found | None:
        """Return the rows where ``is_found``, bool [N], is True; the first one is shown whole."""
        widths = self.lengths[is_found]
        return self.found_at(self.starts[is_found], message, widths, severity=severity)

    def keep(self, is_found: np.ndarray, is_meant: Callable[[int], bool]) -> None:
        """Set ``is_found`` to False, in place, where ``is_meant`` rejects the place."""
        for i in np.flatnonzero(is_found).tolist():
            is_found[i] = is_meant(i)

    def text(self, start: int, stop: int) -> str:
        """Return the text of these tokens; equal ids are decoded once."""
        ids = self.ids[start:stop]
        key = ids.tobytes()
        if key not in self._texts:
            self._texts[key] = self.vocabulary.text(ids.tolist())
        return self._texts[key]

    @cached_property
    def _texts(self) -> dict[bytes, str]:
        return {}

    def excerpt(self, start: int, stop: int) -> str:
        """Return the text around these tokens, which are marked; long texts are cut short."""
        row = int(self.rows_of(start))
        begin, end = self.offsets[row : row + 2].tolist()
        shown = min(stop, end, start + _LONGEST)
        last = shown if shown < min(stop, end) else min(end, stop + _AFTER)
        first = max(begin, start - _BEFORE)
        places = ((first, start), (start, shown), (shown, last))
        before, marked, after = (self.vocabulary.text(self.ids[a:b].tolist()) for a, b in places)
        sides = "... " if first > begin else "", " ..." if last < end else ""
        text = f"{sides[0]}{before} \u27e6{marked}\u27e7 {after}{sides[1]}".strip()
        segment = f", segment {self.segments[row]}" if len(self.segments) else ""
        return f"row {self.numbers[row]}{segment}: {' '.join(text.split())}"


@dataclass(frozen=True)
class Turns:
    """Turns of all rows in order, as tokens among the T of ``columns``. Legend: M turns.

    A turn is its header, its text from ``begins`` on, the token that ends it, and what the template
    writes before the next header.
    """

    columns: AuditColumns
    starts: np.ndarray  # int64 [M], the first token of each header
    begins: np.ndarray  # int64 [M], the first token after each header
    kinds: np.ndarray  # int64 [M], the number of its header in Vocabulary.role_ids
    are_answers: np.ndarray  # bool [M]

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
        """int64 [M], tokens by which a mask is late at both ends; negative: early, 0: right."""
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
            first, stop = np.where(fits, begins, 0), np.where(fits, stops, 1)
            fits &= trained[first] & ~trained[first - 1]
            fits &= columns.num_trained_in(first, stop) == stop - first
            fits &= (stop == limits) | ~trained[np.minimum(stop, len(trained) - 1)]
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
            if usual < width:  # masks that begin early, unless they train the end, too
                ends = self.ends[is_trained & (gaps == usual)]
                is_usual &= columns.trained[ends[ends >= 0]].any()
            if is_usual and self.is_markup(int(like[0]), int(like[0]) + usual):
                is_prompted, width = self.begins + usual <= self.limits, usual
        return np.where(is_prompted, self.begins + width, self.begins)

    def is_markup(self, start: int, stop: int) -> bool:
        """Whether these tokens are white space and tags alone."""
        if stop - start > _LONGEST_GAP:
            return False
        return not _MARKUP.sub("", self.columns.text(start, stop)).strip()


def turns_of(columns: AuditColumns) -> Turns:
    """Find the turns of rows. Needs a template that begins answers with an added token."""
    none = np.empty(0, dtype=np.int64)
    starts, widths, kinds = [none], [none], [none]
    names = columns.vocabulary.role_ids
    for kind, (ids, role) in enumerate(names.items()):
        places = columns.places_of(ids)
        starts.append(columns.without_repeated(places) if role == "assistant" else places)
        widths.append(np.full_like(starts[-1], len(ids)))
        kinds.append(np.full_like(starts[-1], kind))
    found = np.stack([np.concatenate(parts) for parts in (starts, widths, kinds)])
    found = found[:, np.lexsort((-found[1], found[0]))]  # of headers at one place the longest
    stops = np.maximum.accumulate(np.append(-1, found[0] + found[1]))
    first, width, kind = found[:, found[0] >= stops[:-1]]
    are_answers = np.array([role == "assistant" for role in names.values()], dtype=np.bool_)
    return Turns(columns, first, first + width, kind, are_answers[kind])
