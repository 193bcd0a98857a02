"""Where rows come from: files of records, and the sources of a TokenizedDataset."""

from __future__ import annotations

import glob
import gzip
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np

from torch_collate_kit._checks import needed_package
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.loading.dataset.columns import ListColumn
from torch_collate_kit.ragged import Nested, Ragged, unchecked
from torch_collate_kit.reading.columns import (
    is_number,
    number_column,
    scalar_column,
    shape_of,
    vector_column,
)
from torch_collate_kit.reading.entries import joined, segment_name
from torch_collate_kit.reading.keys import (
    KNOWN,
    TOKEN_TYPES,
    TOKENIZE,
    added_keys,
    check_keys,
    column_of,
    first_example,
    first_with,
    refuse_boundaries,
)
from torch_collate_kit.reading.reader import opened_column
from torch_collate_kit.reading.source import (
    Examples,
    Source,
    are_nested,
    check_not_transformed,
    is_a,
    is_sequence,
)
from torch_collate_kit.vision.families import IMAGE_FIELDS

if TYPE_CHECKING:
    from datasets import Dataset

DatasetSource: TypeAlias = "Examples | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
IDS = ("input_ids", "labels")  # tokens; masks may be weights
_logger = logging.getLogger("torch_collate_kit.loading")
_LONG_NUMBER = re.compile(rb"\d{19}|\.\d{11}|\d[eE]-")
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_KINDS |= {".txt": "text"} | dict.fromkeys(
    (".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"), "json"
)
_MAX_DEPTH = 63  # of an Arrow table; at some 5,000 its JSON reader ends the process
_SAFE_DEPTH = 500


def read_records(name: str | os.PathLike[str], *, split: str = "train") -> Dataset:
    """Return the records of a file (JSON Lines, JSON, Parquet, Arrow), a saved folder or the hub.

    Raises:
        DataError: there is no such file, folder, name or split; a file cannot be read, or is
            nested too deep. Of JSON Lines it names the line.
        ImportError: datasets is not installed, or zstandard for ``.jsonl.zst``.

    >>> read_records("no_such_file.jsonl")
    Traceback (most recent call last):
    torch_collate_kit.errors.DataError: no_such_file.jsonl: there is no such file
    """
    datasets = needed_package("datasets", "reading dataset files")
    path, name = Path(name), str(name)
    if path.is_file() or (_suffix(path) in _KINDS and not path.is_dir()):
        return _of_split(_read_file(datasets, path), name, split)
    # what else is here or has the suffix of a file is no name of the hub
    is_of_file = path.exists() or path.suffix in (".npy", ".jinja")
    if not path.is_dir() and (is_of_file or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise DataError(f"{name}: there is no such file or folder")
    try:
        found = datasets.load_from_disk(name) if path.is_dir() else datasets.load_dataset(name)
    except IndexError as error:  # a saved dataset without a file
        raise DataError(
            f"{name}: there are no rows in it (0 examples); give at least one"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: no saved dataset here, and not found on the hub: {_short(error)}"
        ) from error
    return _of_split(found, name, split)


def _of_split(found: Any, name: str, split: str) -> Dataset:
    """Return the split, of what has none the whole where no other than "train" was asked for."""
    splits = found if isinstance(found, dict) else {"train": found}
    if split not in splits:
        raise DataError(f"{name}: there is no split {split!r}; it has {', '.join(sorted(splits))}")
    return splits[split]


def _read_file(datasets: Any, path: Path) -> Dataset:
    kind = _KINDS.get(_suffix(path))
    if kind is None:
        raise DataError(
            f"{path}: not a kind of file that is read ({', '.join(_KINDS)}); convert it, or save "
            "it with Dataset.save_to_disk and name the folder"
        )
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if kind == "json":
        _check_depth(path, _SAFE_DEPTH)
    try:
        if kind == "parquet":
            parquet = needed_package("pyarrow.parquet", "reading Parquet files")
            if not parquet.read_metadata(path).num_rows:
                raise ValueError("there are no rows in it (0 examples); give at least one")
        how: Any = {"sample_by": "document"} if kind == "text" else {}  # a file is one document
        rows = datasets.load_dataset(kind, data_files=glob.escape(str(path)), split="train", **how)
        if kind == "json":
            _warn_of_rounding(path, [n for n, of in rows.features.items() if "Json(" in str(of)])
        return rows
    except Exception as error:  # of many types, as the file is broken
        if kind == "json":
            _check_depth(path, _MAX_DEPTH)
        found = _broken_line(path) if _suffix(path).startswith(".jsonl") else None
        raise DataError(f"{path}: {found or _short(error.__cause__ or error)}") from error


def _suffix(path: Path) -> str:
    """Return the suffix of a file, with that of its compression."""
    both = "".join(path.suffixes[-2:]).lower()
    return both if both in _KINDS else path.suffix.lower()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a JSON file and decompress it."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as stored:
            file: Any = gzip.GzipFile(fileobj=stored) if suffix == ".gz" else stored
            if suffix == ".zst":
                unpacker = needed_package("zstandard", "reading .zst files").ZstdDecompressor()
                file = io.BufferedReader(unpacker.stream_reader(stored, read_across_frames=True))
            yield file
    except Exception as error:
        if suffix not in (".gz", ".zst") or isinstance(error, DataError | ImportError):
            raise
        raise DataError(f"{path}: cannot be decompressed: {_short(error)}") from error


def _check_depth(path: Path, limit: int) -> None:
    """Check that no line, or no place of a file that is not JSON Lines, is nested deeper."""
    with _opened(path) as file:
        parts = file if _suffix(path).startswith(".jsonl") else [file.read()]
        for number, part in enumerate(parts, 1):
            if part.count(b"[") + part.count(b"{") <= limit:
                continue
            unescaped = part.replace(rb"\\", b"").replace(rb"\"", b"")
            outside = b"".join(unescaped.split(b'"')[::2])  # of strings
            bare = np.frombuffer(outside, dtype=np.uint8)
            opens, closes = ((bare | 32) == ord(bracket) for bracket in "{}")  # "[" | 32 is "{"
            depths = np.cumsum(opens.astype(np.int32) - closes)
            if len(depths) and depths.max() > limit:
                line = number + int((bare[: (depths > limit).argmax()] == 10).sum())
                raise DataError(
                    f"{path}: line {line} is nested {depths.max():,} deep, more than the "
                    f"{_MAX_DEPTH} levels that an Arrow table holds; give what is inside as a JSON "
                    "string"
                )


def _warn_of_rounding(path: Path, columns: Sequence[str]) -> None:
    """Log the first number in columns of objects that ``datasets`` rounds to 10 decimals."""
    try:  # not public, so that another release may be without them
        from datasets.utils.json import ujson_dumps, ujson_loads
    except ImportError:
        return
    if not columns:
        return

    def is_changed(value: Any) -> bool:
        if isinstance(value, list | dict):
            return any(map(is_changed, value.values() if isinstance(value, dict) else value))
        try:
            return isinstance(value, int | float) and ujson_loads(ujson_dumps(value)) != value
        except ValueError:  # beyond 64 bits
            return True

    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not _LONG_NUMBER.search(line):
                continue
            with suppress(ValueError, AttributeError):  # not of JSON Lines
                record = json.loads(line)
                if any(is_changed(record.get(name)) for name in columns):
                    _logger.warning(
                        "%s: line %d has numbers that datasets does not keep exactly (it has 10 "
                        "decimals and 64 bits in columns of objects); write them, or the arguments "
                        "of the call, as a JSON string",
                        *(path, number),
                    )
                    return


def _broken_line(path: Path) -> str | None:
    """Return the error of a JSON Lines file, with its line; None if there is none."""
    record = None
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode()) if line.strip() else record
            except ValueError as error:
                return f"line {number} is not JSON: {getattr(error, 'msg', error)}"
            if not isinstance(record, dict | None):
                return f"line {number} is not a JSON object, but {line[:40]!r}"
    return "there is no record in it" if record is None else None


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "..."


# ---- columns in files of bare numbers, mapped into memory by path ----


class TokenFiles:
    """Columns of files by path, dtype, first byte and offsets, which a worker maps again."""

    def __init__(self, columns: dict[str, Any], offsets: list[np.ndarray]) -> None:
        self.files: dict[str, Any] = {
            name: [tuple(file[:3]) for file in files] for name, files in columns.items()
        }
        self.offsets, self.column_names = offsets, list(columns)

    def select(self, names: Sequence[str]) -> TokenFiles:
        """Return the files of these columns alone."""
        return TokenFiles({name: self.files[name] for name in names}, self.offsets)

    def table(self) -> dict[str, ListColumn]:
        """Return the columns, mapped."""
        return {
            name: ListColumn(
                name,
                files[0][1],
                [
                    unchecked(mapped(path, dtype, first, int(offsets[-1])), offsets)
                    for (path, dtype, first), offsets in zip(files, self.offsets, strict=True)
                ],
            )
            for name, files in self.files.items()
        }


def mapped(path: str, dtype: np.dtype[Any], first: int, count: int | None = None) -> np.ndarray:
    """Return the tokens of a file from this byte on, mapped into memory."""
    try:
        size = os.path.getsize(path) - first
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if size <= 0 or size % dtype.itemsize or (count is not None and size != count * dtype.itemsize):
        wanted = "at least one token" if count is None else f"{count:,} tokens"
        raise DataError(
            f"{path}: has {size:,} bytes of tokens, and {wanted} of {dtype} ({dtype.itemsize} "
            "bytes each) are expected; it is damaged, or of another dtype"
        )
    return np.memmap(path, dtype, "r", first).view(np.ndarray)


# ---- the columns of a TokenizedDataset ----


def kept_source(given: Any, columns: Sequence[str] | None, train_all: bool) -> Any:
    """Return a Dataset, a Table, Arrow files or a dict of arrays, with the kept columns alone."""
    if is_a(given, "datasets", "Dataset"):
        check_not_transformed(given)
    if isinstance(given, TokenFiles):
        return given.select(_chosen(given.column_names, columns, train_all, lambda _: ()))
    if isinstance(given, str | os.PathLike) and os.path.isdir(given):
        given = read_records(given)
    source = Source(given, "source")
    if not source.is_arrow:
        return _copied(source, columns, train_all)
    names = _chosen(source.names, columns, train_all, source.first_rows)
    if is_a(source.data, "datasets", "Dataset"):
        return source.data.with_format(None).select_columns(names)
    return source.data.select(names)


def _chosen(
    available: Sequence[str],
    columns: Sequence[str] | None,
    train_all: bool,
    column: Callable[[str], Any],
) -> list[str]:
    """Return the columns to keep: without ``columns`` those that the collators read."""
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, got {columns!r}; pass [{columns!r}]")
    if columns is None:
        if "input_ids" in available:
            images = tuple(name for name in IMAGE_FIELDS if name in available)
            known = (*images, *TOKEN_TYPES) if images else ()
            refuse_boundaries(available, column, known, lambda _: "the source")
            check_keys(dict.fromkeys(available, "the source"), train_all=train_all, declared=known)
        known = (*KNOWN, *IMAGE_FIELDS, "num_cut_tokens", "is_continued")
        columns = [name for name in known if name in available]
    for name in columns:
        if name not in available:
            raise ValueError(f"columns names {name!r}, the source has {list(available)}")
    if "input_ids" not in columns:
        given = list(available if "input_ids" not in available else columns)
        raise DataError(f"no input_ids, got columns {given}; {TOKENIZE}")
    return list(dict.fromkeys(columns))


def _copied(
    source: Source, columns: Sequence[str] | None, train_all: bool
) -> dict[str, np.ndarray | Ragged | Nested | list[Any]]:
    """Return examples as columns in memory: one copy."""
    if not len(source):
        raise DataError("the source is empty (0 examples); give at least one")
    examples = source.part(0, len(source))
    if isinstance(examples, Mapping):
        names = _chosen(list(examples), columns, train_all, column_of(examples))
        of_segments = are_nested(examples["input_ids"])
        return {name: _column(name, examples[name], of_segments=of_segments) for name in names}
    first = first_example(examples, "input_ids")
    copied: dict[str, Any] = {}
    owners = first_with(examples)
    added = [] if columns else added_keys(examples, owners)
    available = [key for key in owners if key not in added]
    names = _chosen(available, columns, train_all, column_of(examples))
    of_segments = are_nested([first.get("input_ids")])
    for name in names:
        without = next((i for i, example in enumerate(examples) if name not in example), None)
        if without is not None and name not in IMAGE_FIELDS:
            raise DataError(
                f"example {without} has no {name}, other examples have; give every one the same "
                "keys, or pass columns="
            )
        column = [example.get(name) for example in examples]
        copied[name] = _column(name, column, of_segments=of_segments)
    return copied


def _column(name: str, column: Any, *, of_segments: bool) -> Any:
    if name in IMAGE_FIELDS:
        if of_segments:
            return list(column)  # which is refused
        return [None if entry is None else np.array(entry) for entry in column]
    if of_segments and are_nested(column):
        flat, counts = opened_column(name, column)
        offsets = np.append(0, np.cumsum(counts))
        with examples_named(segment_name(offsets)):
            return Nested(_numbers(name, flat), offsets)
    if name not in KNOWN and all(isinstance(entry, str) for entry in column):
        return list(map(str, column))
    is_list = name == "num_actions" and any(map(is_sequence, column))  # of each segment
    if not is_list and (name == "num_actions" or any(map(is_number, column))):
        kinds = "iu" if name == "num_actions" else "iufb"
        return np.array(scalar_column(name, column, kinds, "give a number"))
    return _numbers(name, column)


def _numbers(name: str, column: Any) -> Ragged:
    shape = () if name in KNOWN else shape_of(column)
    read = partial(vector_column, shape=shape) if shape else number_column
    if name in IDS:
        numbers = joined(number_column(name, column, "ids" if name == "input_ids" else "labels"))
    else:
        try:
            numbers = joined(read(name, column, "whole numbers"))
        except DataError:  # not whole, or True and False
            numbers = joined(read(name, column, "numbers"))
    return Ragged(numbers.values.astype(numbers.values.dtype.str), numbers.offsets)
