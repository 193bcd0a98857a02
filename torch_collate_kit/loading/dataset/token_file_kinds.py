"""Files of tokens as pretraining stacks write them, mapped into memory."""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_int, type_name
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset.sources import TokenFiles, mapped
from torch_collate_kit.loading.dataset.tokenized import TokenizedDataset

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", 34  # of Megatron's index: magic, version, dtype, two counts
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # of int32: magic, version and dtype
_NEMO = 278895051
_BLOCK = 2**22  # tokens that are searched at a time


def token_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    dtype: Any = None,
    end_id: int | None = None,
    start_id: int | None = None,
    loss_masks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> TokenizedDataset:
    """Open files of tokens as a dataset of their documents, which stay on the disk.

    Args:
        paths: one or more files: Megatron's ``.bin`` with its ``.idx`` (sequences of a document are
            joined); ``.bin`` of llm.c, modded-nanogpt or nanoGPT; 1-D ``.npy`` that ``np.save``
            wrote; ``.npy`` of OLMo-core with documents in ``.csv.gz``.
        dtype: of files of nothing but tokens, such as "uint16"; others are checked against it.
        end_id: the token that ends each document, where no index says where they are.
        start_id: the token that begins each document (llm.c), in place of ``end_id``.
        loss_masks: for each path a file of a byte per token, 1 where it is trained.

    Returns a :class:`~torch_collate_kit.TokenizedDataset` in the order of the files: ``input_ids``
    in their dtype, ``loss_mask`` (bool) if there are masks, no empty documents. Files are checked
    and mapped, not copied; a worker gets paths and offsets, and maps them again.

    Raises:
        DataError: a file is missing, empty, damaged, of another dtype, or of a kind that is not
            read; documents are marked in no way or in two. The message names the file.
        TypeError: an id that is not an int, paths or a dtype that are none.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "tokens.bin")
    >>> np.array([5, 6, 0, 7, 0, 8], dtype="uint16").tofile(path)
    >>> tokens = token_files(path, dtype="uint16", end_id=0)
    >>> tokens[:]["input_ids"].tolist()
    [[5, 6, 0], [7, 0], [8]]
    """
    given = {"end_id": end_id, "start_id": start_id}
    marks = {k: checked_int(k, of, minimum=0) for k, of in given.items() if of is not None}
    try:
        kind = None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f'dtype must be one of NumPy, such as "uint16", got {dtype!r}') from error
    if kind is not None and kind.kind not in "iu":
        raise ValueError(f"dtype must be one of integers, got {kind}; tokens are ids")
    names = _listed("paths", paths)
    masks = [] if loss_masks is None else _listed("loss_masks", loss_masks)
    if not names:
        raise DataError("paths has no file; name at least one")
    if masks and len(masks) != len(names):
        raise DataError(f"loss_masks has {len(masks)} files, paths has {len(names)}; one for each")
    files = [_opened(Path(name), kind, marks) for name in names]
    dtypes = {file[1]: path for path, file in zip(names, files, strict=True)}
    if len(dtypes) > 1:
        found = ", ".join(f"{path} has {own}" for own, path in dtypes.items())
        raise DataError(f"files of one dtype make a dataset: {found}; open them one by one")
    columns: dict[str, Any] = {"input_ids": files}
    if masks:
        columns["loss_mask"] = [
            _mask(Path(name), *file) for name, file in zip(masks, files, strict=True)
        ]
    source: Any = TokenFiles(columns, [file[3] for file in files])
    return TokenizedDataset(source)


def _listed(name: str, paths: Any) -> list[str]:
    try:
        one = isinstance(paths, str | os.PathLike)
        return [os.path.abspath(path) for path in ([paths] if one else paths)]
    except TypeError as error:
        raise TypeError(f"{name} must be paths of files, got {type_name(paths)}") from error


def _opened(
    path: Path, dtype: np.dtype[Any] | None, marks: dict[str, int]
) -> tuple[str, np.dtype[Any], int, np.ndarray]:
    """Return path, dtype and first byte of the tokens of a file, and offsets of its documents."""
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    first, offsets = 0, None
    index = path.with_suffix(".csv.gz" if path.suffix == ".npy" else ".idx")
    has_index = path.suffix in (".bin", ".npy") and index.exists()
    if has_index and path.suffix == ".bin":
        own, offsets = _read_index(index)
    else:
        own, first = _header(path, dtype)
        offsets = _read_list(index) if has_index else None
    tokens = mapped(str(path), own, first, None if offsets is None else int(offsets[-1]))
    ways = [str(index)] * has_index + [f"{name}={token}" for name, token in marks.items()]
    if len(ways) != 1:
        raise DataError(
            f"{path}: documents are marked by {' and '.join(ways) or 'nothing'}; give one of them, "
            "or pass the token that ends each as end_id or begins each as start_id"
        )
    if own.kind not in "iu" or not own.isnative or dtype not in (None, own):
        wanted = "native integers" if dtype is None else f"dtype={dtype}"
        raise DataError(f"{path}: holds {own}, and tokens are {wanted}")
    if offsets is None:
        offsets = _searched(path, tokens, marks)
    offsets = offsets[np.append(True, np.diff(offsets) > 0)]
    if len(offsets) < 2:
        raise DataError(f"{path}: has no document that is not empty")
    return str(path), own, first, offsets


def _header(path: Path, dtype: np.dtype[Any] | None) -> tuple[np.dtype[Any], int]:
    """Return the dtype and the first byte of the tokens of a file without an index."""
    try:
        with open(path, "rb") as file:
            start = file.read(12)
        if start[:6] == b"\x93NUMPY":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.ndim != 1:
                raise ValueError(f"its shape is {tokens.shape}, and tokens are one flat array")
            mapped(str(path), tokens.dtype, tokens.offset, len(tokens))
            return tokens.dtype, tokens.offset
    except DataError:
        raise
    except Exception as error:  # of many types, as the header is broken
        raise DataError(f"{path}: cannot be read: {error}") from error
    magic, version, count = np.frombuffer(start.ljust(12, b"\0"), "<i4").tolist()
    if magic in _LLM_C:
        if version != _LLM_C[magic][0]:
            raise DataError(f"{path}: a header of llm.c, version {version}, which is not read")
        kind = np.dtype(_LLM_C[magic][1])
        mapped(str(path), kind, 1024, count)
        return kind, 1024
    if magic == _NEMO and version == 1:
        raise DataError(f"{path}: a .bin of NeMo, which is not read; write it as one of Megatron")
    if dtype is None:
        no_index = f"no index ({path.stem}.idx) and " * (path.suffix != ".npy")
        raise DataError(
            f"{path}: {no_index}no header, so the dtype of its tokens is not known; pass it, such "
            'as dtype="uint16"'
        )
    return dtype, 0


def _read_index(path: Path) -> tuple[np.dtype[Any], np.ndarray]:
    """Return the dtype and the offsets of documents of Megatron's index, checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    head = np.frombuffer(data[9:_HEADER].ljust(25, b"\0"), "<u8,u1,<u8,<u8")
    version, code, n, num_ends = head[0].tolist()
    if data[:9] != _MAGIC or version != 1 or code not in _DTYPES:
        raise DataError(f"{path}: not an index of Megatron, version 1 with a known dtype")
    sizes = (_HEADER + 12 * n + 8 * num_ends, _HEADER + 13 * n + 8 * num_ends)
    if len(data) not in sizes or not num_ends:
        raise DataError(
            f"{path}: has {len(data):,} bytes, and {n:,} sequences with {num_ends:,} ends of "
            f"documents take {sizes[0]:,}; it is damaged"
        )
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(data, "<i4", n, _HEADER)
    pointers = np.frombuffer(data, "<i8", n, _HEADER + 4 * n)
    ends = np.frombuffer(data, "<i8", num_ends, _HEADER + 12 * n)
    before = np.append(0, np.cumsum(lengths, dtype=np.int64))
    is_elsewhere = pointers != before[:-1] * dtype.itemsize
    is_falling = (np.diff(ends) < 0).any() or (ends[0], ends[-1]) != (0, n)
    for what, is_wrong in (
        ("a negative length", (lengths < 0).any()),
        ("pointers that are not the running lengths", is_elsewhere.any()),
        (f"ends of documents that do not rise from 0 to {n:,}", is_falling),
        ("modes of several kinds of data", any(data[sizes[0] :])),
    ):
        if is_wrong:
            raise DataError(f"{path}: has {what}; it is damaged, or not of text")
    return dtype, before[ends]


def _read_list(path: Path) -> np.ndarray:
    """Return the offsets of documents that lines of "start,end" list."""
    try:
        with gzip.open(path, "rt", newline="") as file:
            lines = [(row[0], row[1]) for row in csv.reader(file)]
        spans = np.array(lines, dtype=np.int64).reshape(-1, 2)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        IndexError,
        OverflowError,
        csv.Error,
    ) as error:
        raise DataError(f"{path}: not lines of start,end in gzip: {error}") from error
    offsets = np.append(0, spans[:, 1])
    if (spans[:, 0] != offsets[:-1]).any() or (np.diff(offsets) < 0).any():
        raise DataError(f"{path}: its documents do not follow each other from 0 on; it is damaged")
    return offsets


def _searched(path: Path, tokens: np.ndarray, marks: dict[str, int]) -> np.ndarray:
    """Return the offsets of documents that a token ends or begins."""
    ((name, token),) = marks.items()
    found = [
        start + np.flatnonzero(tokens[start : start + _BLOCK] == token)
        for start in range(0, len(tokens), _BLOCK)
    ]
    places = np.concatenate(found) + (name == "end_id")
    if not len(places):
        raise DataError(f"{path}: {name}={token} is not in it; pass the token that is")
    return np.concatenate([[0], places, [len(tokens)]])


def _mask(path: Path, *of: Any) -> tuple[str, np.dtype[Any], int]:
    """Return where the mask of a file is; its length and values are checked."""
    values = mapped(str(path), np.dtype("u1"), 0, int(of[3][-1]))
    if any(values[i : i + _BLOCK].max() > 1 for i in range(0, len(values), _BLOCK)):
        raise DataError(f"{path}: a loss mask has a byte per token, 0 or 1, and this has others")
    return str(path), np.dtype(bool), 0
