"""Datasets in any form as columns or examples; only this file distinguishes the forms."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import needed_package, type_name
from torch_collate_kit.batch import Batch
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Nested, Ragged, unchecked

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

_CHAT_KEYS = ("messages", "conversations", "instruction", "prompt")
_FORMS = (
    "a list of examples, a mapping of columns, a pandas DataFrame, a datasets.Dataset (of a "
    "DatasetDict one split), a pyarrow Table, a TokenizedDataset or another map-style dataset, or "
    "paths of Arrow or Parquet files"
)


class MapStyle(Protocol):
    """Anything with a length whose items are examples, or whose slices are columns."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Examples = Sequence[Mapping[str, Any]] | Mapping[str, Any] | MapStyle


def is_a(value: Any, module: str, name: str) -> bool:
    """Return whether a value is an instance of a class, without importing its module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def check_not_transformed(dataset: Any) -> None:
    """Refuse a ``datasets.Dataset`` whose columns are not what its rows are."""
    if dataset.format["type"] == "custom":
        raise TypeError(
            "the datasets.Dataset computes its rows on the fly (set_transform), and columns would "
            "bypass that; apply it with .map first"
        )


def is_sequence(value: Any) -> bool:
    """Return whether a value is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def kind_of(names: Collection[str]) -> Literal["tokens", "rollouts", "chats"] | None:
    """Return the kind of records with these keys, or None."""
    if "input_ids" in names:
        return "tokens"
    if "prompt_ids" in names or "response_ids" in names:
        return "rollouts"
    return "chats" if any(key in names for key in _CHAT_KEYS) else None


def are_preferences(names: Collection[str]) -> bool:
    """Return whether records with these keys are pairs, or answers with a label, not yet tokens."""
    is_rated = "completion" in names and "label" in names
    return kind_of(names) in ("chats", None) and (is_rated or {"chosen", "rejected"} <= set(names))


class Source:
    """Dataset in any form, which is read in parts.

    ``data`` is a mapping of columns, a pandas DataFrame, a sequence or a map-style dataset of
    examples, a ``datasets.Dataset`` in any format, anything with ``__arrow_c_stream__`` (a pyarrow
    Table, a polars frame, a relation of duckdb), or one or more paths of Arrow or Parquet files.
    Errors call it ``name``, and name ``others`` that would do.
    """

    def __init__(self, data: Any, name: str = "examples", others: str = "") -> None:
        paths = [data] if isinstance(data, str | os.PathLike) else data
        is_lazy = is_a(data, "polars", "LazyFrame")
        if is_a(data, "datasets", "Dataset") and data.format["type"] != "custom":
            data = data.with_format("arrow", columns=data.format["columns"])
        elif is_a(data, "pandas", "DataFrame") and "object" in map(str, data.dtypes):
            if not data.columns.is_unique:
                raise DataError(f"{name} has columns of one name: {[*data.columns]}; rename them")
            data = {column: data[column].tolist() for column in data}
        elif is_lazy or (
            hasattr(data, "__arrow_c_stream__")
            and not is_a(data, "datasets", "Dataset")
            and not is_a(data, "pyarrow", "Table")
        ):
            data = data.collect() if is_lazy else data
            data = data.reset_index(drop=True) if is_a(data, "pandas", "DataFrame") else data
            pa = needed_package("pyarrow", "reading columns of Arrow")
            try:
                found = pa.table(data)
            except pa.ArrowInvalid as error:  # one column alone
                raise TypeError(f"{name} is {type_name(data)}; pass {others}{_FORMS}") from error
            if not len(found):
                raise DataError(
                    f"{name} has no rows (0 examples); a stream of record batches is read once"
                )
            data = found
        elif is_sequence(paths) and paths and all(isinstance(p, str | os.PathLike) for p in paths):
            data = ArrowFiles([os.fspath(path) for path in paths])
        self.data = data
        self.is_arrow = isinstance(data, ArrowFiles) or (
            is_a(data, "pyarrow", "Table")
            or (is_a(data, "datasets", "Dataset") and data.format["type"] == "arrow")
        )
        no_examples = bytes | np.ndarray | Tensor | Ragged | Batch
        is_other = isinstance(data, no_examples) or is_a(data, "datasets", "DatasetDict")
        is_map_style = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if is_other or not (is_map_style or isinstance(data, ArrowFiles)):
            raise TypeError(f"{name} is {type_name(data)}; pass {others}{_FORMS}")

    @property
    def names(self) -> list[str]:
        """Names of the columns, or keys of the first example that is a mapping."""
        if isinstance(self.data, Mapping):
            return list(self.data)
        if is_a(self.data, "datasets", "Dataset"):
            return list(self.data.format["columns"])
        if hasattr(self.data, "column_names"):
            return list(self.data.column_names)
        rows = (self.data[i] for i in range(len(self.data)))
        return list(next((row for row in rows if isinstance(row, Mapping)), ()))

    def __len__(self) -> int:
        if not isinstance(self.data, Mapping):
            return len(self._opened())
        return len(next(iter(self._columns().values()), ()))

    def part(self, start: int, stop: int) -> Any:
        """Return the examples ``start`` to ``stop``: a list of them, or a mapping of columns."""
        if isinstance(self.data, Mapping):
            return {**self.data, **{k: column[start:stop] for k, column in self._columns().items()}}
        data = self._opened()
        if self.is_arrow:
            is_table = is_a(data, "pyarrow", "Table")
            return _ArrowColumns(data.slice(start, stop - start) if is_table else data[start:stop])
        if isinstance(data, Sequence) or hasattr(data, "column_names"):
            return data[start:stop]
        return [data[i] for i in range(start, stop)]

    def first_rows(self, name: str) -> Any:
        """Return the first rows of a column."""
        return Source(self.data).part(0, 1000)[name]

    def records(self, start: int, stop: int) -> Sequence[Any]:
        """Return the examples ``start`` to ``stop`` as a list of dicts of Python objects."""
        if is_a(self.data, "datasets", "Dataset") and self.is_arrow:
            names = self.data.format["columns"]
            part = self.data.with_format(None, columns=names)[start:stop]
        elif isinstance(self.data, Mapping):
            part = {name: column[start:stop] for name, column in self._columns().items()}
        else:
            part = self.part(start, stop)
        if isinstance(part, _ArrowColumns):
            rows: list[Any] = part.table.to_pylist()
            return rows
        if not isinstance(part, Mapping):
            return part
        return [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]

    def _opened(self) -> Any:
        if isinstance(self.data, ArrowFiles):
            self.data = self.data.table()
        return self.data

    def _columns(self) -> dict[str, Any]:
        """Return the columns of a mapping, without texts and numbers that hold for all rows."""
        return {key: column for key, column in self.data.items() if num_rows(column) is not None}


def check_even(columns: Mapping[str, Any], first: str) -> None:
    """Check that every column has as many rows as ``first``."""
    expected = num_rows(columns[first])
    for key, column in columns.items():
        found = num_rows(column)
        if None not in (found, expected) and found != expected:
            raise DataError(
                f"column {key} has {found} rows, {first} has {expected}; give every column one "
                "entry per row"
            )


def num_rows(column: Any) -> int | None:
    """Return the number of rows of a column; None for text and for values without a length."""
    if not hasattr(column, "__len__") or isinstance(column, str | bytes):
        return None
    return None if getattr(column, "ndim", 1) == 0 else len(column)


def are_nested(column: Any) -> bool:
    """Return whether the entries of a column are lists of segments."""
    if isinstance(column, Nested):
        return True
    if isinstance(column, Ragged | Tensor) or not len(column):
        return False
    return is_list_of_rows(next(iter(column)))


def is_list_of_rows(entry: Any) -> bool:
    """Return whether an entry of a column is a list of lists, arrays or tensors."""
    is_list = is_sequence(entry) or (isinstance(entry, np.ndarray) and entry.dtype.hasobject)
    return bool(is_list and len(entry) and _is_row(entry[0]))


def _is_row(value: Any) -> bool:
    return is_sequence(value) or (isinstance(value, np.ndarray | Tensor) and value.ndim > 0)


class _ArrowColumns(Mapping[str, Any]):
    """Columns of an Arrow table, each converted when it is read; some hold ``vectors``."""

    def __init__(self, table: pa.Table, vectors: Collection[str] = ()) -> None:
        self.table, self.vectors = table, vectors

    def __getitem__(self, name: str) -> Any:
        if name not in self.table.column_names:
            raise KeyError(name)
        column = self.table.column(name)
        return _of_arrow(column, name in self.vectors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.column_names)

    def __len__(self) -> int:
        return len(self.table.column_names)


def _is_list(kind: Any) -> bool:
    is_of = sys.modules["pyarrow"].types
    found: bool = is_of.is_list(kind) or is_of.is_large_list(kind) or is_of.is_fixed_size_list(kind)
    return found


def _of_arrow(column: Any, as_vectors: bool = False) -> Any:
    """Return a Ragged, a Nested or an array of numbers; all else as Python objects.

    Lists of lists of one size are, ``as_vectors``, a Ragged ``[T, k]``.
    """
    is_of, array = sys.modules["pyarrow"].types, column.combine_chunks()
    if as_vectors:
        array = getattr(array, "storage", array)  # of datasets.Array2D
    sizes = []
    while not array.null_count and _is_list(array.type):
        sizes.append(array.value_lengths().to_numpy(zero_copy_only=False))
        array = array.flatten()
    kind = array.type
    is_number = is_of.is_integer(kind) or is_of.is_floating(kind) or is_of.is_boolean(kind)
    depth = len(sizes)
    if array.null_count or not is_number or (not depth if as_vectors else depth > 2):
        return column.to_pylist()
    flat = array.to_numpy(zero_copy_only=False)
    offsets = [np.append(0, np.cumsum(of, dtype=np.int64)) for of in sizes]
    if depth < 2:
        return unchecked(flat, *offsets) if offsets else flat
    if not as_vectors:
        return Nested(unchecked(flat, offsets[1]), offsets[0])
    if not all(len(of) and (of == of[0]).all() for of in sizes[1:]):
        return column.to_pylist()
    return unchecked(flat.reshape(-1, *(int(of[0]) for of in sizes[1:])), offsets[0])


def with_vectors(columns: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return columns of which ``names`` hold a vector per token; Arrow's are read as arrays."""
    return _ArrowColumns(columns.table, names) if isinstance(columns, _ArrowColumns) else columns


class ArrowFiles:
    """Arrow or Parquet files by path, which a worker maps again."""

    def __init__(self, paths: list[str]) -> None:
        for path in paths:
            if os.path.isdir(path):
                raise ValueError(f"{path!r} is a folder; pass datasets.load_from_disk(folder)")
            if not os.path.exists(path):
                raise FileNotFoundError(
                    f"there is no file {path!r:.60}: strings are taken as paths of Arrow or "
                    "Parquet files; texts must be tokenized first (tokenize_chat_dataset)"
                )
        are_parquet = {_is_parquet(path) for path in paths}
        if len(are_parquet) > 1:
            raise ValueError("the source mixes Parquet and Arrow files; make two datasets of them")
        self._paths = [os.path.abspath(path) for path in paths]  # a worker may start elsewhere
        (self._is_parquet,) = are_parquet
        if self._is_parquet:
            parquet = needed_package("pyarrow.parquet", "reading Parquet files")
            filled = [path for path in self._paths if _num_parquet_rows(path)]
            if not filled:
                raise DataError(
                    f"there are no rows in {paths[0]!r} (0 examples); give at least one"
                )
            self._paths = paths = filled
            self._names = [parquet.read_schema(path).names for path in paths]
        else:
            self._names = [_mapped(path).column_names for path in paths]
        self.column_names = list(dict.fromkeys(name for names in self._names for name in names))

    def select(self, names: list[str]) -> Any:
        """Return the files with these columns alone; of Parquet files a ``datasets.Dataset``."""
        kept = [[name for name in names if name in found] for found in self._names]
        for path, found in zip(self._paths, kept, strict=True):
            if found != kept[0]:
                raise ValueError(
                    f"{path!r} has the columns {found}, {self._paths[0]!r} has {kept[0]}; make "
                    "them alike, or pass columns="
                )
        if self._is_parquet:
            datasets = needed_package("datasets", "reading Parquet files")
            return datasets.Dataset.from_parquet(self._paths, columns=names).select_columns(names)
        self.column_names = names
        return self

    def table(self) -> pa.Table:
        """Return the files as one table: Arrow files are mapped into memory, not read."""
        if self._is_parquet:
            return self.select(self.column_names).data.table
        import pyarrow as pa

        tables = [_mapped(path).select(self.column_names) for path in self._paths]
        try:
            return pa.concat_tables(tables)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"the files of the source have columns of different types ({error}); cast them"
            ) from error


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _num_parquet_rows(path: str) -> int:
    pa = needed_package("pyarrow", "reading Parquet files")
    try:
        return int(pa.parquet.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path!r} is not a whole Parquet file ({error}); write or download it again"
        ) from error


def _mapped(path: str) -> pa.Table:
    pa = needed_package("pyarrow", "reading Arrow files")
    file = pa.memory_map(path)
    is_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    try:
        return (pa.ipc.open_file if is_file_format else pa.ipc.open_stream)(file).read_all()
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path!r} is neither an Arrow nor a Parquet file ({error}); load it with datasets and "
            "pass the Dataset, or open files of tokens with loading.token_files"
        ) from error
