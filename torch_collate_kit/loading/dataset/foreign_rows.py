"""Rows that another tool has packed, as the documents that are in them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from torch_collate_kit._checks import (
    checked_bool,
    checked_int,
    checked_optional_int,
    needed_package,
)
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.chat.dataset import bars_of_rank_0, check_is_dataset
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset.columns import plain
from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reading.keys import MEDIA, TARGETS
from torch_collate_kit.reading.source import is_a

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

_logger = logging.getLogger("torch_collate_kit.loading")

_RENAMED = {"tokens": "input_ids", "inputs": "input_ids"}
_RENAMED |= {"targets": "labels", "loss_weight": "loss_mask"}
# What a column says of documents: their numbers, of which pads have this one; or by its form.
_KINDS: dict[str, int | str] = {
    **dict.fromkeys(("attention_mask", "inputs_segmentation", "targets_segmentation"), 0),
    **dict.fromkeys(("sequence_id", "segment_ids", "seq_idx"), -1),
    **dict.fromkeys(
        ("position_ids", "input_pos", "inputs_position", "targets_position"), "positions"
    ),
    **dict.fromkeys(("seq_lengths", "seq_lens", "seq_lens_padded"), "lengths"),
    "seq_start_id": "starts",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"), "offsets"),
}
_REMOVED = {*_KINDS, "packing_params", "max_length_q", "max_length_k", "max_seqlen"}
_COUNTS = ("padding", "untrained", "last_targets")
_ROWS_AT_A_TIME = 256
_SILENT = (
    "attention_mask is at most 1, so nothing says where documents begin, and each row is one; if a "
    "token ends each document, pass end_id"
)


def unpack_dataset(
    rows: Any,
    *,
    shifted: bool | None = None,
    end_id: int | None = None,
    pad_id: int | None = None,
    num_proc: int | None = None,
) -> Any:
    """Return the documents of rows that another tool has packed, an example each.

    The inverse of TRL's ``pack_dataset``. All forms, boundaries and refusals: docs/loading.md.

    Args:
        rows: a ``datasets.Dataset``; or columns, a mapping or a ``pyarrow.Table``, as in
            ``stream.map(partial(unpack_dataset, shifted=True), batched=True,
            remove_columns=stream.column_names)``.
        shifted: whether entries of the loss target belong to the next token. None: labels are what
            the ids show, masks are not shifted.
        end_id: a document also ends after each such token.
        pad_id: the token of which lengths may leave some over at the end of a row.
        num_proc: the number of processes; None for this one.

    Returns a new Dataset and a Counter: cells of "padding", "untrained" documents, which are left
    out, and trained "last_targets", which a shifted target has of a token that no row has. Lists of
    numbers are per token and cut alike, others repeated, boundaries removed; values are copied, in
    their dtype (unsigned labels as int64). A target's first entry is -100 or 0. Of columns only
    columns are returned, counts logged, and rows that no column divides are one document each.

    Raises:
        DataError: boundaries that contradict each other, the row or its pads; labels that are
            neither the ids nor the next ids; no boundaries; images. The message names the row.
        TypeError: rows or options of another type.

    >>> row = {"input_ids": [11, 12, 13, 21, 22, 0], "labels": [11, -100, 13, 21, 22, -100]}
    >>> row["attention_mask"] = [1, 1, 1, 2, 2, 0]
    >>> unpack_dataset({name: [entries] for name, entries in row.items()})
    {'input_ids': [[11, 12, 13], [21, 22]], 'labels': [[-100, -100, 13], [-100, 22]]}
    """
    ids = {"end_id": end_id, "pad_id": pad_id}
    for name, value in ids.items():
        if value is not None:
            checked_int(name, value, minimum=0)
    if shifted is not None:
        checked_bool("shifted", shifted, "None")
    checked_optional_int("num_proc", num_proc, hint="None is this process")
    if not isinstance(rows, Mapping) and not is_a(rows, "pyarrow", "Table"):
        check_is_dataset(rows, "unpack_dataset", ", or stream.map(unpack_dataset, batched=True)")
        return _of_dataset(rows.with_format("arrow"), shifted, ids, num_proc)
    table = _table(rows) if isinstance(rows, Mapping) else rows
    if not len(table):
        raise DataError("the columns are empty (0 rows); give at least one")
    packed = _Packed(table, 0, ids)
    if not packed.speaks:  # of a stream perhaps the last batch
        _logger.warning("of %d rows: %s", packed.num_rows, _SILENT)
    found, counts = packed.documents(shifted)
    _logger.info("left out of packed rows: %s", dict(counts))
    return found.to_pydict() if isinstance(rows, Mapping) else found


def _table(rows: Mapping[str, Any]) -> pa.Table:
    pa = needed_package("pyarrow", "unpack_dataset")
    found = {}
    for name, column in rows.items():
        try:
            found[name] = pa.array([of.tolist() if hasattr(of, "tolist") else of for of in column])
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise DataError(f"{name} does not hold one list of numbers per row: {error}") from error
    return pa.table(found)


@bars_of_rank_0()
def _of_dataset(rows: Any, shifted: bool | None, ids: Any, num_proc: int | None) -> Any:
    if not len(rows):
        raise DataError("the dataset is empty (0 rows); give at least one")
    speaks, is_shifted = False, None
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        packed = _Packed(rows[start : start + _ROWS_AT_A_TIME], start, ids)
        speaks |= packed.speaks
        is_shifted = packed.shift(shifted) if is_shifted is None else is_shifted
        if speaks and is_shifted is not None:
            break
    if not speaks:
        raise DataError(_SILENT)
    mapped = rows.map(
        partial(_documents, shifted=is_shifted, ids=ids),
        with_indices=True,
        batched=True,
        batch_size=_ROWS_AT_A_TIME,
        remove_columns=rows.column_names,
        num_proc=num_proc,
        desc="Unpacking rows",
    ).with_format(None)
    counts = +Counter({name: sum(mapped.data.column(f"_{name}").to_pylist()) for name in _COUNTS})
    lengths = mapped.data.column("input_ids").combine_chunks().value_lengths().to_numpy()
    mapped = mapped.remove_columns([f"_{name}" for name in _COUNTS])
    if not lengths.any():
        raise DataError(f"no document of the {len(rows)} rows is trained: {dict(counts)}")
    if not lengths.all():  # a batch had no document
        mapped = mapped.select(np.flatnonzero(lengths)).flatten_indices()
    _logger.info("left out of %d packed rows: %s", len(rows), dict(counts))
    return mapped, counts


def _documents(table: pa.Table, indices: list[int], *, shifted: bool | None, ids: Any) -> pa.Table:
    """Return documents, at least an empty one; the first has the counts of all."""
    found, counts = _Packed(table, indices[0], ids).documents(shifted, at_least=1)
    for name in _COUNTS:
        found = found.append_column(f"_{name}", [[counts[name]] + [0] * (len(found) - 1)])
    return found


class _Packed:
    """Packed rows end to end: which cells hold tokens, and at which of these documents begin."""

    def __init__(self, table: pa.Table, first_row: int, ids: Mapping[str, int | None]) -> None:
        self._names = names = [_RENAMED.get(name, name) for name in table.column_names]
        self.num_rows = len(table)
        self._table, self._first_row = table.rename_columns(names), first_row
        targets = [name for name in TARGETS if name in names]
        wrong = [name for name in names if name in MEDIA or names.count(name) > 1] + targets[1:]
        if wrong or "input_ids" not in names:
            raise DataError(
                f"packed rows have input_ids, no images, at most one loss target, and each column "
                f"once, got {table.column_names}; remove {wrong or 'what is not packed'}"
            )
        self._kinds = [name for name in _KINDS if name in names]
        if "seq_lens_padded" in names and "seq_lens" in names:  # they are read together
            self._kinds.remove("seq_lens")
        if not self._kinds and ids["end_id"] is None:
            raise DataError(
                f"nothing in the columns {names} says where documents begin; if a token ends each, "
                "pass end_id, else pack the source again"
            )
        self._target = targets[0] if targets else ""
        self._lengths = self._lists("input_ids")[1]
        self._firsts = np.cumsum(self._lengths) - self._lengths
        self._row_of = np.repeat(np.arange(len(table), dtype=np.int32), self._lengths)
        self._find_documents(**ids)

    def _fail(self, cell: int, text: str) -> NoReturn:
        row = int(self._row_of[cell])
        raise DataError(f"row {row + self._first_row}, token {cell - self._firsts[row]}: {text}")

    def _places(self) -> np.ndarray:
        return np.arange(len(self._row_of))[self._cells]

    def _lists(self, name: str) -> tuple[Any, np.ndarray]:
        """Return the entries of a column of lists end to end, in Arrow, and the length of each."""
        array = plain(self._table.column(name)).combine_chunks()
        if not hasattr(array, "value_lengths") or array.null_count or array.flatten().null_count:
            wrong = (not isinstance(of, list) or None in of for of in array.to_pylist())
            raise DataError(
                f"row {self._first_row + [*wrong].index(True)}: {name} is null or has a null in "
                f"it, or is no list ({array.type}); drop the row, or the column"
            )
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        return array.flatten(), lengths.astype(np.int64)

    def _per_token(self, name: str) -> Any:
        """Return the entries of a column with one per token, end to end, in Arrow."""
        entries, counts = self._lists(name)
        if len(wrong := np.flatnonzero(counts != self._lengths)):
            raise DataError(
                f"row {wrong[0] + self._first_row}: {name} has {counts[wrong[0]]} entries, "
                f"input_ids has {self._lengths[wrong[0]]}; give each token one, or remove {name}"
            )
        return entries

    def _numpy(self, name: str) -> np.ndarray:
        values: np.ndarray = self._per_token(name).to_numpy(zero_copy_only=False)
        if not len(values):
            return np.zeros(0, np.int64)
        if values.dtype.kind not in "iufb":
            raise DataError(f"{name} holds {values.dtype}; it must hold numbers")
        return values

    def _whole(self, name: str) -> np.ndarray:
        """Return the whole numbers of a column per token: int64."""
        values = self._numpy(name)
        if values.dtype.kind == "f":
            is_whole = (np.floor(values) == values) & (np.abs(values) < 2**53)
            if not is_whole.all():
                cell = int(is_whole.argmin())
                self._fail(cell, f"{name} is {values[cell]}; give whole numbers")
        return values.astype(np.int64, copy=False)

    def _find_documents(self, end_id: int | None, pad_id: int | None) -> None:
        ids = self._numpy("input_ids")
        is_pad, padded_by = np.zeros(len(ids), dtype=bool), ""
        begins = {name: np.zeros(len(ids), dtype=bool) for name in self._kinds}
        for name, own in begins.items():
            kind = _KINDS[name]
            if kind == "positions":
                own[1:] = np.diff(self._whole(name)) != 1
            elif isinstance(kind, int):
                numbers = self._checked_numbers(name, kind)
                own[1:] = np.diff(numbers) != 0
                pads = numbers == kind
                if padded_by and (pads != is_pad).any():
                    cell = int((pads != is_pad).argmax())
                    self._fail(cell, f"a pad by one of {padded_by} and {name} alone; remove one")
                is_pad, padded_by = pads, name
            else:
                may_be_left = is_pad if pad_id is None else is_pad | (ids == pad_id)
                self._read_lists(name, own, is_pad, may_be_left)
        has_pads = bool(is_pad.any())
        cells: Any = np.flatnonzero(~is_pad) if has_pads else slice(None)
        self._cells = cells
        self._ids, self._rows = ids[cells], self._row_of[cells]
        opens_row = np.append(True, self._rows[1:] != self._rows[:-1])[: len(self._rows)]
        self._begins = {name: own[cells] & ~opens_row for name, own in begins.items()}
        self._is_first = np.logical_or.reduce([opens_row, *self._begins.values()])
        if has_pads:
            self._is_first[1:] |= np.diff(cells) > 1
        if end_id is not None:
            self._is_first[1:] |= self._ids[:-1] == end_id
        self._starts = np.flatnonzero(self._is_first)
        self._sizes = np.diff(self._starts, append=len(self._ids))
        # most rows have an attention_mask, so that it may be the one kind
        is_one_mask = end_id is None and self._kinds == ["attention_mask"]
        self.speaks = not is_one_mask or bool(self._begins["attention_mask"].any())

    def _checked_numbers(self, name: str, pad: int) -> np.ndarray:
        """Return the numbers of documents: they rise in a row, and a pad ends a document."""
        numbers = self._whole(name)
        if (numbers < pad).any():
            cell = int((numbers < pad).argmax())
            self._fail(cell, f"{name} is {numbers[cell]}, below {pad}, which is that of pads")
        cells = np.flatnonzero(numbers != pad)
        steps, rows = np.diff(numbers[cells]), self._row_of[cells]
        is_wrong = ((steps < 0) | ((steps == 0) & (np.diff(cells) > 1))) & (np.diff(rows) == 0)
        if is_wrong.any():
            cell, before = cells[1:][is_wrong][0], numbers[cells[:-1][is_wrong][0]]
            hint = "the documents of a row are numbered in their order, without pads inside"
            if pad < 0 and not numbers[cell]:
                hint = "rename it to attention_mask if 0 stands at pads"
            self._fail(cell, f"{name} is {numbers[cell]} after {before}; {hint}")
        return numbers

    def _whole_lists(self, name: str) -> list[list[int]]:
        """Return the whole numbers of each row."""
        entries, counts = self._lists(name)
        kind = str(entries.type)
        try:
            if not kind.startswith(("int", "uint", "float", "double", "null")):
                raise ValueError(f"it holds {kind}")
            numbers = entries.cast("int64").to_numpy(zero_copy_only=False)
        except ValueError as error:  # that of Arrow is one, too
            raise DataError(f"{name} must hold whole numbers: {error}") from error
        return [part.tolist() for part in np.split(numbers, np.cumsum(counts))[:-1]]

    def _read_lists(self, name: str, begins: Any, is_pad: Any, may_be_left: Any) -> None:
        """Mark where documents begin by a list per row, and the pads that it leaves."""
        kind = _KINDS[name]
        of_real = "seq_lens" if name == "seq_lens_padded" and "seq_lens" in self._names else name
        given = (self._whole_lists(column) for column in (of_real, name))
        for row, (sizes, rooms) in enumerate(zip(*given, strict=True)):
            first, length = self._firsts[row], self._lengths[row]
            edges = [0, *accumulate(rooms)] if kind == "lengths" else rooms
            edges = [*rooms, length] if kind == "starts" else edges
            ends = np.array([max(min(edge, length + 1), -1) for edge in edges] or [-1])
            rooms = np.diff(ends)
            sizes = np.array(sizes, np.int64) if kind == "lengths" else rooms
            left = slice(first + ends[-1], first + length)
            if (
                ends[0] != 0
                or len(sizes) != len(rooms)
                or not ((sizes >= 0) & (sizes <= rooms)).all()
                or not (ends[-1] <= length if kind == "lengths" else ends[-1] == length)
                or not may_be_left[left].all()
            ):
                found = str(self._table.column(name)[row].as_py())
                raise DataError(
                    f"row {row + self._first_row}: {name} is {found:.60}, which does not end at "
                    f"the row's {length} tokens; give all documents in order, and the token of "
                    "pads after them as pad_id"
                )
            begins[first + ends[:-1][rooms > 0]] = True
            is_pad[left] = True
            is_pad[first + span_indices(ends[:-1] + sizes, rooms - sizes)] = True

    def shift(self, shifted: bool | None) -> bool | None:
        """Return whether the target is shifted, proved where it is labels; None: both fit."""
        if self._target != "labels":
            doubtful = {"seq_start_id", "segment_ids"} & {*self._kinds}
            if shifted is None and self._target and doubtful:
                raise DataError(
                    f"{self._target} beside {min(doubtful)} may be that of the next token, which "
                    "the ids do not show; pass shifted=True (Megatron-Bridge, NeMo, Levanter) or "
                    "shifted=False"
                )
            return bool(shifted)
        labels, ids = self._numpy("labels")[self._cells], self._ids

        def wrong(way: bool) -> np.ndarray:
            found = (labels != IGNORE_INDEX) & (labels != (np.roll(ids, -1) if way else ids))
            if way:  # the last of a document has no next token
                found &= ~np.roll(self._is_first, -1)
            return found

        ways = (False, True) if shifted is None else (shifted,)
        fits = [way for way in ways if not wrong(way).any()]
        if fits:
            return None if len(fits) > 1 else fits[0]
        way = ways[0]
        both = wrong(False) & wrong(True)
        place = int((both if both.any() and shifted is None else wrong(way)).argmax())
        is_other = not wrong(not way)[self._rows == self._rows[place]].any()
        what = ("the ids" if way else "the next ids") if is_other else "neither ids nor next ids"
        rest = f"shifted={not way} fits this row" if is_other else "label the tokens themselves"
        self._fail(self._places()[place], f"labels are {what} (here {labels[place]}); {rest}")

    def documents(self, shifted: bool | None, at_least: int = 0) -> tuple[pa.Table, Counter[str]]:
        """Return the trained documents, and what is left out; ``at_least`` so many, empty ones."""
        shifted, last, target = self.shift(shifted), 0, None
        is_trained = self._sizes > 1
        if self._target:
            ignored = IGNORE_INDEX if self._target == "labels" else 0
            target = self._numpy(self._target)[self._cells]
            if self._target == "labels" and target.dtype.kind == "u":  # which has no -100
                target = target.astype(np.int64)
            if shifted is None and (target != ignored).any():
                first = self._places()[(target != ignored).argmax()]
                self._fail(first, "labels are both the ids and the next ids; pass shifted=")
            if shifted:
                last = int((target[self._starts + self._sizes - 1] != ignored).sum())
            target = np.roll(target, 1) if shifted else target.copy()
            target[self._starts] = ignored
            if len(target):
                is_trained = np.logical_or.reduceat(target != ignored, self._starts)
        self._check_agreement(is_trained)
        counts = Counter(padding=len(self._row_of) - len(self._ids), last_targets=last)
        counts["untrained"] = int((~is_trained).sum())
        kept = slice(None) if is_trained.all() else np.repeat(is_trained, self._sizes)
        sizes, rows = self._sizes[is_trained], self._rows[self._starts[is_trained]]
        if len(sizes) < at_least:
            sizes = rows = np.zeros(at_least, dtype=np.int64)
        changed = {"input_ids": self._ids[kept]}
        if target is not None:
            changed[self._target] = target[kept]
        return self._cut(changed, sizes, rows, kept), +counts

    def _check_agreement(self, is_trained: np.ndarray) -> None:
        """Check that a kind with a boundary in a row has all of the row's."""
        for name, own in self._begins.items() if len(self._begins) > 1 else ():
            speaks = np.bincount(self._rows[own], minlength=len(self._lengths)) > 0
            for other, theirs in self._begins.items():
                missing = np.flatnonzero(theirs & ~own & speaks[self._rows])
                if _KINDS[name] == "positions":  # they may run on into pads
                    missing = missing[is_trained[np.searchsorted(self._starts, missing)]]
                if len(missing):
                    text = f"a document begins here by {other}, and not by {name}; remove one"
                    self._fail(self._places()[missing[0]], text)

    def _cut(self, changed: Any, sizes: np.ndarray, rows: np.ndarray, kept: Any) -> Any:
        """Return the columns of documents, of these sizes and rows."""
        import pyarrow as pa

        offsets, found = pa.array(np.append(0, np.cumsum(sizes)).astype(np.int32)), {}
        for name in self._names:
            column = self._table.column(name)
            kind, is_list = str(column.type), hasattr(column.type, "value_type")
            if name in _REMOVED:
                continue
            if name not in changed and (not is_list or "string" in kind):
                found[name] = column.take(pa.array(rows))
                continue
            if name not in changed:
                changed[name] = self._per_token(name).take(pa.array(self._places()[kept]))
            found[name] = pa.ListArray.from_arrays(offsets, pa.array(changed[name]))
        return pa.table(found)
