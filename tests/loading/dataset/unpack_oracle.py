"""The documents of one packed row, by a loop over its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

NUMBERS = {"attention_mask": 0, "inputs_segmentation": 0, "targets_segmentation": 0}
NUMBERS |= {"sequence_id": -1, "segment_ids": -1, "seq_idx": -1}
POSITIONS = ("position_ids", "input_pos", "inputs_position", "targets_position")
LENGTHS = ("seq_lengths", "seq_lens")
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
RENAMED = {
    "tokens": "input_ids",
    "inputs": "input_ids",
    "targets": "labels",
    "loss_weight": "loss_mask",
}
TARGETS = {"labels": -100, "loss_mask": 0, "completion_mask": 0, "assistant_masks": 0}
BOUNDARIES = (*NUMBERS, *POSITIONS, *LENGTHS, *OFFSETS, "seq_lens_padded", "seq_start_id")


def unpacked(
    rows: list[Mapping[str, Any]],
    *,
    shifted: bool = False,
    end_id: int | None = None,
    pad_id: int | None = None,
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the documents of well-formed rows and what was left out."""
    documents: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for row in rows:
        found, left_out = _of_row(dict(row), shifted, end_id, pad_id)
        documents += found
        counts += left_out
    return documents, counts


def _of_row(
    row: dict[str, Any], shifted: bool, end_id: int | None, pad_id: int | None
) -> tuple[list[dict[str, Any]], Counter[str]]:
    row = {RENAMED.get(name, name): value for name, value in row.items()}
    ids = row["input_ids"]
    pads, begins = _pads(row, pad_id), _begins(row)
    documents: list[list[int]] = []  # of cells
    for cell in range(len(ids)):
        if cell in pads:
            continue
        before = ids[cell - 1] if cell and cell - 1 not in pads else None
        is_first = cell == 0 or cell - 1 in pads or cell in begins
        if is_first or (end_id is not None and before == end_id):
            documents.append([])
        documents[-1].append(cell)
    found, counts = [], Counter(padding=len(pads))
    for cells in documents:
        document: dict[str, Any] = {}
        is_trained = len(cells) > 1
        for name, value in row.items():
            if name in BOUNDARIES:
                continue
            if not isinstance(value, list) or len(value) != len(ids):
                document[name] = value
                continue
            document[name] = [value[cell] for cell in cells]
            if name in TARGETS:
                own = document[name]
                if shifted and own[-1] != TARGETS[name]:
                    counts["last_targets"] += 1
                own = [TARGETS[name], *(own[:-1] if shifted else own[1:])]
                document[name] = own
                is_trained = any(entry != TARGETS[name] for entry in own)
        if is_trained:
            found.append(document)
        else:
            counts["untrained"] += 1
    return found, counts


def _pads(row: Mapping[str, Any], pad_id: int | None) -> set[int]:
    pads = set()
    for name, pad in NUMBERS.items():
        pads |= {cell for cell, number in enumerate(row.get(name, ())) if number == pad}
    covered: set[int] = set()
    padded = row.get("seq_lens_padded", row.get("seq_lens"))
    if padded is not None:
        for begin, real in zip(
            accumulate(padded, initial=0), row.get("seq_lens", padded), strict=False
        ):
            covered |= set(range(begin, begin + real))
    elif "seq_lengths" in row and pad_id is not None:
        covered = set(range(sum(row["seq_lengths"])))
    if covered:
        pads |= set(range(len(row["input_ids"]))) - covered
    return pads


def _begins(row: Mapping[str, Any]) -> set[int]:
    begins: set[int] = set()
    for name in NUMBERS:
        numbers = row.get(name, ())
        begins |= {i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]}
    for name in POSITIONS:
        positions = row.get(name, ())
        begins |= {i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1}
    for name in ("seq_lens_padded", "seq_lens", "seq_lengths"):
        if name in row:
            begins |= set(accumulate(row[name]))
            break
    for name in (*OFFSETS, "seq_start_id"):
        begins |= set(row.get(name, ()))
    return begins
