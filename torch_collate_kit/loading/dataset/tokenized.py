"""Tokenized rows as columns: random reads without a Python object per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, overload

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from torch_collate_kit._checks import checked_bool, checked_int, type_name
from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset.columns import (
    ArrayColumn,
    ListColumn,
    NestedColumn,
    are_lists_of_segments,
    column_of,
    plain,
)
from torch_collate_kit.loading.dataset.fingerprints import fingerprint_of
from torch_collate_kit.loading.dataset.sources import DatasetSource, TokenFiles, kept_source
from torch_collate_kit.packing import RankPlan
from torch_collate_kit.packing.rank_plan import PlannedExamples
from torch_collate_kit.packing.rows import running_sum
from torch_collate_kit.packing.trees import depths_of
from torch_collate_kit.ragged import Ragged, row_indices, unchecked
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import ArrowFiles, is_a
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import PIXEL_FIELDS

_ROWS_AT_A_TIME = 1000  # when all rows are read
_TOKENS_AT_A_TIME = 2**22  # when what segments share is looked for, or one row
_MAX_COUNTED = 10_000_000  # rows whose lengths a repr adds up


class _BatchColumns(dict[str, Any]):
    """Columns of a batch, with an error for torch's own collate function, which expects a list."""

    def __missing__(self, key: object) -> NoReturn:
        if key != 0:
            raise KeyError(key)
        raise TypeError(
            "a TokenizedDataset returns columns, not a list of examples; pass the DataLoader a "
            "collate_fn that accepts them, such as PackedCollator(tokenizer, max_tokens=4096)"
        )


class TokenizedDataset(Dataset[dict[str, Any]]):
    """Map-style dataset that passes whole columns to a DataLoader's collator.

    Args:
        source: a ``datasets.Dataset``; an Arrow table; paths of Arrow or Parquet files, or a folder
            that ``save_to_disk`` or the command ``tokenize`` wrote; or examples in memory (a list,
            a mapping of columns, a DataFrame, another dataset), which are copied into columns.
        columns: the columns to keep, of lists of numbers or vectors, of numbers, or of strings. By
            default those that the collators know, and ``num_cut_tokens``, which ``audit`` reads.
        train_all: every token of a source without a loss target is trained. Must be given if it has
            other columns than ``input_ids`` and ``attention_mask``, unless ``columns`` is given.
        vision: how images become tokens, for ``patches`` and to count loss tokens of a source with
            images; a VisionLayout or a processor.

    ``ds[i]`` is a dict of ndarrays, of lists read-only views. ``ds[a:b]`` and
    ``ds.__getitems__(indices)`` are dicts of columns, copied: ``Ragged``, and ndarrays for numbers.
    Reading is lazy. Sources, dtypes and pickling: docs/loading.md.

    Raises:
        DataError: no ``input_ids``; a column without numbers; a null, when its row is read.
        IndexError, TypeError, ValueError: an index or source that does not exist or is wrong.

    >>> ds = TokenizedDataset([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}])
    >>> len(ds), ds.lengths.tolist(), ds[0]
    (3, [3, 1, 2], {'input_ids': array([5, 6, 7])})
    >>> ds.__getitems__([2, 0, -1])["input_ids"].tolist()
    [[9, 4], [5, 6, 7], [9, 4]]
    """

    def __init__(
        self,
        source: DatasetSource,
        *,
        columns: Sequence[str] | None = None,
        train_all: bool = False,
        vision: Any = None,
    ) -> None:
        self._train_all = checked_bool("train_all", train_all)
        is_layout = vision is None or isinstance(vision, VisionLayout)
        self._vision: VisionLayout | None = vision if is_layout else VisionLayout.of(vision)
        given = source._source if isinstance(source, TokenizedDataset) else source
        self._read_from(kept_source(given, columns, train_all))

    def _read_from(self, source: Any) -> None:
        """Read the columns of ``source``, which has the kept ones alone and is pickled."""
        self._source = source
        self._mapping: np.ndarray | None = None  # row of the dataset -> row of its table
        if is_a(source, "datasets", "Dataset"):
            if source._indices is not None:
                self._mapping = source._indices.column(0).to_numpy()
            source = source.data.table
        elif isinstance(source, ArrowFiles | TokenFiles):
            source = source.table()
        names = list(source) if isinstance(source, dict) else source.column_names
        columns = {name: plain(source[name]) for name in names}
        of_segments = are_lists_of_segments(columns["input_ids"])
        self._columns = {
            name: column_of(name, column, of_segments=of_segments)
            for name, column in columns.items()
        }
        tokens = self._columns["input_ids"]
        if not isinstance(tokens, ListColumn | NestedColumn):
            raise DataError("input_ids holds one number per row; it must be a list of token ids")
        self._tokens = tokens
        self._depths: np.ndarray | None = None  # values of shared_lengths

    @property
    def column_names(self) -> list[str]:
        """Names of the kept columns."""
        return list(self._columns)

    @property
    def lengths(self) -> np.ndarray | Ragged:
        """Tokens of every row: int64 [N], a new array each time, from offsets; reads no token.

        Of rows that are lists of segments a Ragged, with the tokens of each segment of a row.
        """
        return self._tokens.lengths(self._mapping)

    @property
    def shared_lengths(self) -> Ragged | None:
        """Tokens at the beginning of each segment that an earlier one of its row has too.

        A Ragged of int64, in the shape of ``lengths``; None of rows that are no lists of segments.
        The first access reads all tokens, about 10 ns for each; it is not pickled. A row's cells
        with ``share_prefixes`` are its tokens without these.

        >>> rows = [{"input_ids": [[5, 6, 7], [5, 6, 8, 9]]}, {"input_ids": [[5, 6]]}]
        >>> TokenizedDataset(rows).shared_lengths.tolist()
        [[0, 2], [0]]
        """
        lengths = self.lengths
        if not isinstance(lengths, Ragged):
            return None
        if self._depths is None:
            before = running_sum(lengths.values)[lengths.offsets]
            parts, start = [np.empty(0, dtype=np.int64)], 0
            while start < len(self):
                most = before[start] + _TOKENS_AT_A_TIME
                stop = max(start + 1, int(np.searchsorted(before, most, side="right")) - 1)
                ids = self._ids_at(np.arange(start, stop))
                parts.append(depths_of(ids.rows.values, ids.rows.offsets, ids.offsets))
                start = stop
            self._depths = np.concatenate(parts)
        return unchecked(self._depths, lengths.offsets)

    def fingerprint(self, num_examples: int | None = None) -> dict[str, Any]:
        """Return a fingerprint of the data, or of their first ``num_examples``: small JSON.

        The number of tokens, a digest of all lengths, and one of the token ids of 64 rows: a change
        of other rows that keeps their lengths is not seen. ValueError if there are fewer examples.

        >>> rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
        >>> TokenizedDataset(rows).fingerprint(2) == TokenizedDataset(rows[:2]).fingerprint()
        True
        """
        count = len(self) if num_examples is None else num_examples
        count = checked_int("num_examples", count, minimum=0)
        if count > len(self):
            raise ValueError(f"num_examples must be at most {len(self)}, got {count}")
        lengths = self.lengths[:count]
        if isinstance(lengths, Ragged):
            return fingerprint_of(lengths, lambda rows: self._ids_at(rows).rows.values)
        return fingerprint_of(lengths, lambda rows: self._ids_at(rows).values)

    def __repr__(self) -> str:
        lengths = self.lengths if len(self) <= _MAX_COUNTED else np.zeros(0, dtype=np.int64)
        counted = lengths.values if isinstance(lengths, Ragged) else lengths
        tokens = f", {counted.sum():,} tokens" if len(counted) else ""
        settings = ", train_all=True" if self._train_all else ""
        if self._vision is not None:
            settings += f", vision={self._vision!r}"
        names = ", ".join(self._columns)
        return f"TokenizedDataset({len(self):,} examples{tokens}; {names}{settings})"

    def __len__(self) -> int:
        return len(self._tokens if self._mapping is None else self._mapping)

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if not hasattr(index, "__index__") or np.ndim(index):
            hint = "a DataLoader takes a sampler of batches as batch_sampler="
            raise TypeError(f"an index is an int or a slice, got {type_name(index)}; {hint}")
        named, rows = self._rows([index])
        return {
            name: of.row(rows, named)
            if isinstance(of, ListColumn | NestedColumn)
            else of.take(rows, named)[0]
            for name, of in self._columns.items()
        }

    @property
    def num_loss_tokens(self) -> np.ndarray:
        """Trained next tokens of every row, as the collators count them: int64 [N], a new array.

        Reads all targets. First tokens do not count, since nothing predicts them (samplers count by
        the ``targets`` of their collator); what a collator would cut off does. DataError for a row
        that no collator would take, ValueError for images without ``vision``.

        >>> rows = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}]
        >>> TokenizedDataset(rows).num_loss_tokens.tolist()
        [1]
        """
        return self.count_loss_tokens("next_token")

    def count_loss_tokens(self, targets: TargetKind) -> np.ndarray:
        """Return the trained tokens of every row with these targets: int64 [N], a new array."""
        text = [k for k, of in self._columns.items() if not isinstance(of, ArrayColumn)]
        image_token_id = None if self._vision is None else self._vision.image_token_id
        parts = [np.empty(0, dtype=np.int64)]
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            stop = min(start + _ROWS_AT_A_TIME, len(self))
            try:
                rows = self._take(np.arange(start, stop), text)
                columns = read_columns(rows, train_all=self._train_all, targets=targets)
                if self._vision is None and len(text) < len(self._columns):
                    raise ValueError(
                        "the source has images, whose tokens are not trained; pass "
                        "vision=processor, which says which tokens these are"
                    )
                parts.append(columns.num_loss_tokens(image_token_id))
            except DataError as error:
                raise DataError(f"rows {start} to {stop - 1}, counted from 0: {error}") from error
        return np.concatenate(parts)

    @property
    def vision(self) -> VisionLayout | None:
        """The ``VisionLayout`` passed at construction, or made of the processor passed; or None.

        >>> print(TokenizedDataset([{"input_ids": [5, 6, 7]}]).vision)
        None
        """
        return self._vision

    @property
    def patches(self) -> list[list[int]]:
        """[N] lists, patches of each image of every row (or tiles); ValueError without ``vision``.

        >>> qwen = VisionLayout("qwen3_vl", image_token_id=9, merge_size=2)
        >>> row = {"input_ids": [9, 5], "pixel_values": np.zeros((4, 1176))}
        >>> row["image_grid_thw"] = np.array([[1, 2, 2]])
        >>> TokenizedDataset([row], train_all=True, vision=qwen).patches
        [[4]]
        """
        if self._vision is None:
            raise ValueError("patches follow from the model's processor; pass vision=processor")
        images = {k: of for k, of in self._columns.items() if isinstance(of, ArrayColumn)}
        others = sorted(images.keys() - self._vision.fields.keys())
        if others:
            raise ValueError(
                f"the source has {', '.join(others)}, which {self._vision.family_name} models do "
                "not have; pass vision= of the model that it was processed for"
            )
        every = np.arange(len(self))
        found = self._take(every, images.keys() - PIXEL_FIELDS)
        if "pixel_values" in images and not found:  # only tiles, of which their number is enough
            counts = images["pixel_values"].outer_lengths()[self._rows(every)[1]]
            found["num_tiles"] = [np.array([n]) if n else None for n in counts.tolist()]
        return [
            self._vision.patches({name: column[i] for name, column in found.items()})
            for i in range(len(self))
        ]

    @overload
    def __getitems__(self, indices: RankPlan) -> PlannedExamples: ...
    @overload
    def __getitems__(self, indices: Sequence[int] | np.ndarray | Tensor) -> dict[str, Any]: ...
    def __getitems__(self, indices: Any) -> Any:
        if isinstance(indices, RankPlan):
            return indices.with_examples(self.__getitems__(indices.indices))
        return _BatchColumns(self._take(indices, self._columns))

    def _ids_at(self, indices: np.ndarray) -> Any:
        """Return the token ids of these rows, a Ragged, or a Nested of segments."""
        return self._take(indices, ["input_ids"])["input_ids"]

    def __getstate__(self) -> dict[str, Any]:
        source = self._source
        if is_a(source, "pyarrow", "Table"):  # its slice alone: pickle would send the whole
            import pyarrow as pa

            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, source.schema) as writer:
                writer.write_table(source)
            source = sink.getvalue()
        return {"source": source, "train_all": self._train_all, "vision": self._vision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        source, self._train_all, self._vision = state.values()
        if is_a(source, "pyarrow", "Buffer"):
            import pyarrow as pa

            source = pa.ipc.open_stream(source).read_all()
        self._read_from(source)

    def _rows(self, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices, 0 to N - 1, and the rows of the table that they stand for."""
        picked = row_indices(indices)
        if picked.ndim != 1:
            raise TypeError(f"indices must be a flat list of integers, got shape {picked.shape}")
        n = len(self)
        outside = (picked < -n) | (picked >= n)
        if outside.any():
            raise IndexError(
                f"index {picked[outside][0]} is outside the dataset, which has {n} rows; give "
                f"{-n} to {n - 1}"
            )
        picked = np.where(picked < 0, picked + n, picked)
        mapped = picked if self._mapping is None else self._mapping[picked].astype(np.int64)
        return picked, mapped

    def _take(self, indices: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return these rows of some columns: Ragged of lists, else arrays, lists of images."""
        named, rows = self._rows(indices)
        return {name: self._columns[name].take(rows, named) for name in names}
