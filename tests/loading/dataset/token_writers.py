"""Files of tokens, written value by value as their tools write them."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}
FORMATS = {"u1": "B", "i1": "b", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q"}
FORMATS |= {"f4": "f", "f8": "d"}


def packed(tokens: list[int], kind: str) -> bytes:
    return b"".join(struct.pack(f"<{FORMATS[kind]}", token) for token in tokens)


def write_megatron(
    folder: Path, documents: list[list[list[int]]], kind: str = "u2", name: str = "m"
) -> Path:
    """Write documents of one or more sequences each."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(packed(sequence, kind) for sequence in sequences)
    size = struct.calcsize(FORMATS[kind])
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[kind])
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    pointer = 0
    for sequence in sequences:
        index += struct.pack("<q", pointer)
        pointer += len(sequence) * size
    end = 0
    index += struct.pack("<q", end)
    for document in documents:
        end += len(document)
        index += struct.pack("<q", end)
    (folder / f"{name}.idx").write_bytes(index)
    (folder / f"{name}.bin").write_bytes(data)
    return folder / f"{name}.bin"


def write_llm_c(path: Path, tokens: list[int], kind: str = "u2") -> Path:
    magic, version = {"u2": (20240520, 1), "u4": (20240801, 7)}[kind]
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(4 * 253)
    path.write_bytes(header + packed(tokens, kind))
    return path


def write_olmo(path: Path, documents: list[list[int]], kind: str = "u2") -> Path:
    path.write_bytes(b"".join(packed(document, kind) for document in documents))
    lines, start = "", 0
    for i, document in enumerate(documents):
        lines += f"{start},{start + len(document)},id-{i},a/b.json.gz,{i}\n"
        start += len(document)
    with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
        file.write(lines)
    return path


def ended_by(tokens: list[int], end_id: int) -> list[list[int]]:
    """Return the documents of tokens, token by token."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end_id:
            documents.append([])
    return [document for document in documents if document]


def begun_by(tokens: list[int], start_id: int) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == start_id:
            documents.append([])
        documents[-1].append(token)
    return [document for document in documents if document]
