"""The sources of a TokenizedDataset, converted to one of four forms.

A ``datasets.Dataset``, a ``pyarrow.Table``, :class:`ArrowFiles`, or a dict of columns in memory:
each with only the kept columns, and as small to send to a worker as possible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit._checks import needed_package
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.columns import tensor_to_numpy
from torch_collate_kit.reading.raw import KNOWN, TOKEN_TYPES, check_keys
from torch_collate_kit.vision.families import IMAGE_FIELDS

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

__all__ = ["IDS", "ArrowFiles", "DatasetSource", "from_state", "is_a", "normalised", "to_state"]

DatasetSource: TypeAlias = (
    "datasets.Dataset | pa.Table | pa.RecordBatch | str | os.PathLike[str] "
    "| Sequence[str | os.PathLike[str]] | Sequence[Mapping[str, Any]]"
)

IDS = ("input_ids", "labels")  # tokens; masks may be weights


class ArrowFiles:
    """Arrow files by path: what a worker needs to map them again."""

    def __init__(self, paths: list[str], names: list[str]) -> None:
        self._paths = [os.path.abspath(path) for path in paths]  # a worker may start elsewhere
        self._names = names

    def table(self) -> pa.Table:
        import pyarrow as pa

        tables = [_mapped(path).select(self._names) for path in self._paths]
        try:
            return pa.concat_tables(tables)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"the files of the source have columns of different types ({error}); cast them"
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
            "pass the Dataset"
        ) from error


def normalised(source: Any, columns: Sequence[str] | None, train_all: bool) -> Any:
    """A Dataset or Table of the chosen columns, Arrow files, or a dict of columns."""
    if isinstance(source, str | os.PathLike):
        source = [source]
    if is_a(source, "datasets", "Dataset"):
        if source.format["type"] == "custom":
            raise TypeError(
                "the datasets.Dataset computes its rows on the fly (set_transform), and columns "
                "would bypass that; apply it with .map first"
            )
        names = _chosen(source.format["columns"], columns, train_all)
        return source.with_format(None).select_columns(names)
    if is_a(source, "pyarrow", "RecordBatch"):
        import pyarrow as pa

        source = pa.Table.from_batches([source])
    if is_a(source, "pyarrow", "Table"):
        return source.select(_chosen(source.column_names, columns, train_all))
    if isinstance(source, list | tuple):
        if source and all(isinstance(entry, str | os.PathLike) for entry in source):
            return _open_files([os.fspath(path) for path in source], columns, train_all)
        if all(isinstance(entry, Mapping) for entry in source):
            return _copied(source, columns, train_all)
    raise TypeError(
        f"source is a {type(source).__name__}; pass a datasets.Dataset (of a DatasetDict one "
        "split), a pyarrow Table, paths of Arrow or Parquet files, or a list of mappings"
    )


def _chosen(available: Sequence[str], columns: Sequence[str] | None, train_all: bool) -> list[str]:
    """The columns to keep: without ``columns`` those that the collators read."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, got {columns!r}; pass [{columns!r}]")
    if columns is None:
        if "input_ids" in available:
            images = tuple(name for name in IMAGE_FIELDS if name in available)
            known = (*images, *TOKEN_TYPES) if images else ()
            check_keys(dict.fromkeys(available, "the source"), train_all=train_all, declared=known)
        columns = [name for name in (*KNOWN, *IMAGE_FIELDS, "num_cut_tokens") if name in available]
    for name in columns:
        if name not in available:
            raise ValueError(f"columns names {name!r}, the source has {list(available)}")
    if "input_ids" not in columns:
        given = list(available if "input_ids" not in available else columns)
        raise DataError(f"no input_ids, got columns {given}; tokenize the text first")
    return list(dict.fromkeys(columns))


def _open_files(paths: list[str], columns: Sequence[str] | None, train_all: bool) -> Any:
    is_parquet = []
    for path in paths:
        if os.path.isdir(path):
            raise ValueError(f"{path!r} is a folder; pass datasets.load_from_disk(folder)")
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"there is no file {path!r:.60}: strings are taken as paths of Arrow or Parquet "
                "files; texts must be tokenized first (tokenize_chat_dataset)"
            )
        with open(path, "rb") as file:
            is_parquet.append(file.read(4) == b"PAR1")
    if len(set(is_parquet)) > 1:
        raise ValueError("the source mixes Parquet and Arrow files; make two datasets of them")
    if is_parquet[0]:
        datasets = needed_package("datasets", "reading Parquet files")
        pq = needed_package("pyarrow.parquet", "reading Parquet files")
        available = [pq.read_schema(path).names for path in paths]
    else:
        available = [_mapped(path).column_names for path in paths]
    first, *others = [_chosen(names, columns, train_all) for names in available]
    for path, names in zip(paths[1:], others, strict=True):
        if names != first:  # a target that only some have would be left out without a word
            raise ValueError(
                f"{path!r} has the columns {names}, {paths[0]!r} has {first}; make them alike, or "
                "pass columns="
            )
    if not is_parquet[0]:
        return ArrowFiles(paths, first)
    return datasets.Dataset.from_parquet(paths, columns=first).select_columns(first)


def _copied(
    examples: Sequence[Mapping[str, Any]], columns: Sequence[str] | None, train_all: bool
) -> dict[str, Any]:
    """Examples as columns in memory: one copy."""
    if not examples:
        raise DataError("the source is an empty list; give at least one example")
    available = list(dict.fromkeys(name for example in examples for name in example))
    copied: dict[str, Any] = {}
    for name in _chosen(available, columns, train_all):
        if name in IMAGE_FIELDS:
            entries = [example.get(name) for example in examples]
            copied[name] = [None if entry is None else np.array(entry) for entry in entries]
            continue
        rows = [_as_array(name, i, example) for i, example in enumerate(examples)]
        if all(row.ndim == 0 for row in rows):
            copied[name] = np.stack(rows)
            continue
        for i, row in enumerate(rows):
            if row.ndim != 1:
                raise DataError(
                    f"row {i}: {name} has shape {row.shape}; an example is one flat list of numbers"
                )
        copied[name] = Ragged.from_rows(rows)
    return copied


def _as_array(name: str, index: int, example: Mapping[str, Any]) -> np.ndarray:
    """The entry of an example: 1-D, or 0-D for a number."""
    if name not in example:
        raise DataError(
            f"row {index} has no {name}, other rows have; give every row the same keys, or pass "
            "columns="
        )
    entry = example[name]
    if isinstance(entry, MaskedArray):
        raise DataError(
            f"row {index}: {name} is a masked array, whose mask would be lost; give .compressed() "
            "or .filled(value)"
        )
    if isinstance(entry, Tensor):
        entry = tensor_to_numpy(name, index, entry)
    try:
        row = np.asarray(entry)
    except (ValueError, TypeError):
        row = np.empty(0, dtype=object)
    if name == "num_actions" and row.size == 1:
        row = row.reshape(())
    if not row.size and row.dtype.kind != "O":
        return np.empty(0, dtype=np.int64)  # of an empty list NumPy makes floats
    kinds = "iu" if name in IDS else "iufb"
    if row.dtype.kind not in kinds:
        wanted = "integers" if name in IDS else "numbers"
        raise DataError(f"row {index}: {name} is {entry!r:.40}; it must be a flat list of {wanted}")
    return row


def is_a(value: Any, module: str, name: str) -> bool:
    """isinstance without an import: if there is such an object, its module is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def to_state(source: Any) -> Any:
    """What is pickled. Of a sliced table the IPC format holds the slice, pickle the whole table."""
    if not is_a(source, "pyarrow", "Table"):
        return source
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, source.schema) as writer:
        writer.write_table(source)
    return sink.getvalue()


def from_state(state: Any) -> Any:
    """The source again."""
    if not is_a(state, "pyarrow", "Buffer"):
        return state
    import pyarrow as pa

    return pa.ipc.open_stream(state).read_all()
