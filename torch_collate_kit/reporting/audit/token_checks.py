"""Single tokens: BOS, EOS, pads, and ids beyond the vocabulary."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.reporting.audit.check import check
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["CHECKS"]

_FEW = 1 / 3  # of the rows: an exception


@check(
    "error",
    "{rows} have ids that the tokenizer does not have, such as {id}: its vocabulary has {size} "
    "tokens; use the tokenizer that made the ids, or add the missing tokens to it",
    needs=("size",),
)
def id_out_of_vocabulary(columns: AuditColumns) -> Found | None:
    """Rows with an id, or a label, that is not below the size of the vocabulary.

    Negative ids are refused by the readers.
    """
    size = columns.vocabulary.size or 0
    is_beyond = columns.ids >= size
    if columns.labels is not None:
        is_beyond |= columns.labels >= size
    places = np.flatnonzero(is_beyond)
    if not len(places):
        return None
    first = int(places[0])
    beyond = int(columns.ids[first])
    if beyond < size and columns.labels is not None:
        beyond = int(columns.labels[first])
    return columns.found_at(places, id=beyond, size=f"{size:,}")


@check(
    "warning",
    "{rows} begin with two BOS tokens (id {bos}), which no model has seen: the chat template "
    "writes one, and the tokenizer another; pass add_special_tokens=False",
    needs=("bos",),
)
def double_bos(columns: AuditColumns) -> Found | None:
    """Rows whose first two tokens are BOS."""
    bos = columns.vocabulary.bos_id
    starts = columns.starts[columns.lengths > 1]
    is_twice = (columns.ids[starts] == bos) & (columns.ids[starts + 1] == bos)
    return columns.found_at(starts[is_twice], 2, bos=bos)


@check(
    "warning",
    "{rows} have a BOS token (id {bos}) within their text, while the others begin with it or have "
    "none: parts of a row were tokenized one by one; pass add_special_tokens=False",
    needs=("bos",),
)
def bos_inside(columns: AuditColumns) -> Found | None:
    """Rows with a BOS token within their text, in at most a third of the rows.

    Silent about one after another BOS, after pads and after the end of an answer, and where BOS is
    EOS.
    """
    vocabulary = columns.vocabulary
    places = columns.places_of_id(vocabulary.bos_id or 0)
    places = places[~columns.begins_row(places)]
    before = [*vocabulary.end_ids, vocabulary.bos_id, vocabulary.pad_id]
    begins = np.isin(columns.ids[places - 1], [token for token in before if token is not None])
    for i in (2, 1):  # white space after an end
        is_blank = ~begins & columns.is_end[np.maximum(places - i, 0)]
        begins |= is_blank
    found = places[~begins]
    is_rare = columns.in_rows(columns.rows_of(found)).sum() <= _FEW * len(columns.lengths)
    if vocabulary.bos_id == vocabulary.eos_id or not is_rare:
        return None
    return columns.found_at(found, bos=vocabulary.bos_id)


@check(
    "note",
    "{rows} do not begin with BOS (id {bos}), while the others do; tokenize all rows the same way",
    needs=("bos",),
)
def bos_in_some_rows(columns: AuditColumns) -> Found | None:
    """Rows without a BOS at the start, where at least half of the rows have one.

    Needs a tokenizer with a BOS that is not its EOS.
    """
    vocabulary = columns.vocabulary
    has_bos = columns.ids[columns.starts] == vocabulary.bos_id
    if vocabulary.bos_id == vocabulary.eos_id or has_bos.sum() * 2 < len(has_bos):
        return None
    return columns.found_at(columns.starts[~has_bos], bos=vocabulary.bos_id)


@check(
    "error",
    "no trained token is {ends}, in {rows} {which}, so the model never learns to stop; {way_out}",
    needs=("eos",),
)
def eos_never_trained(columns: AuditColumns) -> Found | None:
    """That no trained token of the dataset ends an answer.

    The token with which the chat template ends an answer counts as EOS. A warning where that may be
    meant: rollouts, texts without a loss target, and targets of a single token. Silent where
    nothing is trained.
    """
    targets = columns.ids if columns.labels is None else columns.labels
    is_end = np.isin(targets[columns.trained_places], columns.vocabulary.end_ids)
    if is_end.any():
        return None
    has_target = columns.num_trained > 0
    severity: Severity | None = "warning" if columns.are_rollouts else None
    which, way_out = "with a target", "add it to the end of every answer, and train it"
    if not columns.has_target:
        severity, which = "warning", "that are trained as a whole"
        way_out = "add it to the end of every text, unless a text goes on in the next row"
    elif not columns.are_rollouts and (columns.num_trained[has_target] == 1).all():
        severity, which = "warning", "with a single trained token"
        way_out = "that is right if the token is a class; else add it to the end of every answer"
    ends = _names(columns)
    return columns.found_in(
        has_target,
        columns.last_trained,
        severity=severity,
        ends=ends,
        which=which,
        way_out=way_out,
    )


@check(
    "warning",
    "{rows} have {ends} after an answer but do not train it, while other answers do; extend "
    "their target by one token",
    needs=("eos",),
)
def eos_not_trained(columns: AuditColumns) -> Found | None:
    """Rows where the EOS after a trained answer is not trained, while others train theirs.

    Silent where none is trained, which :func:`eos_never_trained` says, and where the pad token is
    the EOS, which :func:`eos_masked_as_pad` explains.
    """
    vocabulary = columns.vocabulary
    if vocabulary.pad_id == vocabulary.eos_id:
        return None
    if not columns.is_end[columns.trained_places].any():
        return None
    return columns.found_at(_unlearnt_ends(columns), ends=_names(columns))


@check(
    "error",
    "{rows} do not train the EOS after their answer: the pad token is the EOS token, and a "
    "collator that hides pads hid it too; mask by position, or set another pad token",
    needs=("eos", "pad"),
)
def eos_masked_as_pad(columns: AuditColumns) -> Found | None:
    """Rows where the EOS after a trained answer is not trained, and the pad token is the EOS.

    Silent where the two ids differ.
    """
    vocabulary = columns.vocabulary
    if vocabulary.pad_id != vocabulary.eos_id:
        return None
    places = _unlearnt_ends(columns)
    return columns.found_at(places[columns.ids[places] == vocabulary.eos_id])


@check(
    "error",
    "{rows} train pad tokens (id {pad}); pads are no target: tokenize without padding, "
    "collators pad",
    needs=("pad",),
)
def pad_trained(columns: AuditColumns) -> Found | None:
    """Rows that train the pad token.

    Where it is the EOS too, the second and further ones at the end of a row are pads; where it
    differs, every one is.
    """
    vocabulary = columns.vocabulary
    is_pad = columns.ids == vocabulary.pad_id
    if vocabulary.pad_id in vocabulary.end_ids:
        is_pad &= _in_last_run(columns, is_pad)
    return columns.found_at(np.flatnonzero(is_pad & columns.trained), pad=vocabulary.pad_id)


@check(
    "warning",
    "{rows} are padded already (id {pad}), and collators take these pads for text; tokenize "
    "without padding",
    needs=("pad",),
)
def padded_rows(columns: AuditColumns) -> Found | None:
    """Rows that begin or end with two or more untrained pads.

    Silent about a single one, which may be an EOS.
    """
    pad, ids = columns.vocabulary.pad_id, columns.ids
    rows = columns.lengths > 2
    starts, ends = columns.starts[rows], columns.ends[rows]
    found = []
    for first in (starts, ends - 2):
        is_run = (ids[first] == pad) & (ids[first + 1] == pad)
        found.append(first[is_run & ~columns.trained[first + 1]])
    return columns.found_at(np.unique(np.concatenate(found)), 2, pad=pad)


def _unlearnt_ends(columns: AuditColumns) -> np.ndarray:
    """int64, tokens that end an answer and are not trained, though the token before them is.

    Of rollouts only the last token of a row: before a tool's answer the end may be the template's.
    Those of other roles than the assistant's end no answer.
    """
    turns = columns.turns
    is_end, trained = columns.is_end, columns.trained
    is_missed = is_end[1:] & ~trained[1:] & trained[:-1] & ~is_end[:-1]
    places = np.flatnonzero(is_missed) + 1
    if len(places):
        places = places[~np.isin(places, turns.ends[~turns.are_answers])]
    if columns.are_rollouts:
        return places[np.isin(places, columns.ends - 1)]
    return places[~columns.begins_row(places)]


def _in_last_run(columns: AuditColumns, is_pad: np.ndarray) -> np.ndarray:
    """bool [T], pads after which the row has pads alone, but for the first of them."""
    others = np.flatnonzero(~is_pad)
    last = np.searchsorted(others, columns.ends) - 1  # the last token of each row that is no pad
    places = np.where(last >= 0, others[np.maximum(last, 0)], -1) if len(others) else last
    firsts = np.maximum(places + 2, columns.starts + 1)
    found = np.zeros(len(is_pad) + 1, dtype=np.int64)
    is_run = firsts < columns.ends
    found[firsts[is_run]] += 1
    np.add.at(found, columns.ends[is_run], -1)
    return np.cumsum(found[:-1]) > 0


def _names(columns: AuditColumns) -> str:
    vocabulary = columns.vocabulary
    return " or ".join(repr(vocabulary.text([token])) for token in vocabulary.end_ids)


CHECKS = (
    eos_never_trained,
    eos_not_trained,
    eos_masked_as_pad,
    pad_trained,
    padded_rows,
    double_bos,
    bos_inside,
    bos_in_some_rows,
    id_out_of_vocabulary,
)
