"""Records in files, in saved folders, or on the hub."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from torch_collate_kit._checks import needed_package
from torch_collate_kit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_KINDS |= dict.fromkeys((".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"), "json")
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
        return _read_file(datasets, path)
    # what else is here or has the suffix of a file is no name of the hub
    is_of_file = path.exists() or path.suffix in (".npy", ".jinja")
    if not path.is_dir() and (is_of_file or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise DataError(f"{name}: there is no such file or folder")
    try:
        found = datasets.load_from_disk(name) if path.is_dir() else datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: no saved dataset here, and not found on the hub: {_short(error)}"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise DataError(f"{name}: there is no split {split!r}; it has {', '.join(sorted(found))}")
    return found[split]


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
        return datasets.load_dataset(kind, data_files=glob.escape(str(path)), split="train")
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
