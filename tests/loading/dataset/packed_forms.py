"""Documents packed as other tools write them, and taken apart by a loop over tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

Document = tuple[list[int], list[bool]]  # ids, and which are trained
PAD, EOS = 0, 2


def drawn(rng: np.random.Generator, num_rows: int = 12) -> list[list[Document]]:
    """Return rows of documents of 1 to 9 tokens; some are not trained at all."""
    rows = []
    for _ in range(num_rows):
        documents = []
        for _ in range(rng.integers(1, 6)):
            ids = rng.integers(3, 50, rng.integers(1, 10)).tolist()
            trained = (
                rng.random(len(ids)) < rng.choice([0.0, 0.5, 1.0], p=[0.1, 0.6, 0.3])
            ).tolist()
            documents.append((ids, trained))
        rows.append(documents)
    return rows


def wanted(rows: list[list[Document]]) -> list[tuple[list[int], list[bool]]]:
    """Return the documents that are trained, without their first target."""
    found = [(ids, [False, *trained[1:]]) for row in rows for ids, trained in row]
    return [(ids, trained) for ids, trained in found if any(trained)]


def _labels(row: list[Document], *, shifted: bool = False) -> list[int]:
    labels = []
    for ids, trained in row:
        own = [i if t else -100 for i, t in zip(ids, trained, strict=True)]
        labels += [*own[1:], -100] if shifted else own
    return labels


def _mask(row: list[Document], *, shifted: bool) -> list[int]:
    mask: list[int] = []
    for _, trained in row:
        mask += [*trained[1:], False] if shifted else trained
    return [int(t) for t in mask]


def _ids(row: list[Document]) -> list[int]:
    return [i for ids, _ in row for i in ids]


def _numbers(row: list[Document], first: int) -> list[int]:
    return [n for n, (ids, _) in enumerate(row, first) for _ in ids]


def _positions(row: list[Document]) -> list[int]:
    return [p for ids, _ in row for p in range(len(ids))]


def _sizes(row: list[Document]) -> list[int]:
    return [len(ids) for ids, _ in row]


def trl_bfd(row: list[Document]) -> dict[str, Any]:
    return {"input_ids": _ids(row), "labels": _labels(row), "seq_lengths": _sizes(row)}


def flattening(row: list[Document]) -> dict[str, Any]:
    offsets = [0, *accumulate(_sizes(row))]
    found = {"input_ids": _ids(row), "labels": _labels(row), "position_ids": _positions(row)}
    for start in offsets[:-1]:
        found["labels"][start] = -100
    return found | {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
                    "seq_idx": _numbers(row, 0), "max_length_q": 9, "max_length_k": 9}  # fmt: skip


def axolotl(row: list[Document], pads: int = 3) -> dict[str, Any]:
    return {
        "input_ids": _ids(row) + [PAD] * pads,
        "labels": _labels(row) + [-100] * pads,
        "attention_mask": _numbers(row, 1) + [0] * pads,
        "position_ids": [*_positions(row), *range(pads)],
    }


def llama_factory_neat(row: list[Document], pads: int = 4) -> dict[str, Any]:
    params = {"sequence_boundaries": [0, *accumulate(_sizes(row))]}
    return (
        axolotl(row, pads)
        | {"position_ids": _positions(row) + [0] * pads}
        | {"packing_params": params}
    )


def llama_factory(row: list[Document], pads: int = 4) -> dict[str, Any]:
    found = axolotl(row, pads)
    positions = _positions(row) + [0] * pads
    return found | {"attention_mask": [1] * len(positions), "position_ids": positions}


def automodel_packed(row: list[Document], multiple: int = 4) -> dict[str, Any]:
    found: dict[str, Any] = {k: [] for k in ("input_ids", "labels", "position_ids")}
    lengths: list[int] = []
    for document in row:
        pads = -len(document[0]) % multiple
        found["input_ids"] += document[0] + [PAD] * pads
        found["labels"] += _labels([document], shifted=True) + [-100] * pads
        lengths.append(len(document[0]) + pads)
        found["position_ids"] += range(lengths[-1])
    return found | {"seq_lens": _sizes(row), "seq_lens_padded": lengths}


def bridge(row: list[Document]) -> dict[str, Any]:
    starts = [0, *accumulate(_sizes(row))][:-1]
    return {"input_ids": _ids(row), "loss_mask": _mask(row, shifted=True), "seq_start_id": starts}


def levanter(row: list[Document], pads: int = 3) -> dict[str, Any]:
    return {
        "tokens": _ids(row) + [PAD] * pads,
        "loss_weight": [float(m) for m in _mask(row, shifted=True)] + [0.0] * pads,
        "segment_ids": _numbers(row, 4) + [-1] * pads,
    }


def maxtext(row: list[Document], pads: int = 3) -> dict[str, Any]:
    numbers, positions = _numbers(row, 1) + [0] * pads, _positions(row) + [0] * pads
    return {
        "inputs": _ids(row) + [0] * pads,
        "targets": _labels(row, shifted=True) + [0] * pads,
        "inputs_segmentation": numbers,
        "targets_segmentation": numbers,
        "inputs_position": positions,
        "targets_position": positions,
    }


FORMS: dict[str, tuple[Callable[..., dict[str, Any]], bool | None]] = {  # and shifted=
    "TRL bfd": (trl_bfd, None),
    "DataCollatorWithFlattening": (flattening, None),
    "axolotl": (axolotl, None),
    "LLaMA-Factory neat_packing": (llama_factory_neat, None),
    "LLaMA-Factory packing": (llama_factory, None),
    "Automodel packed_sequence": (automodel_packed, None),
    "Megatron-Bridge": (bridge, True),
    "Levanter": (levanter, True),
    "maxtext": (maxtext, None),
}
SHIFTED = ("Automodel packed_sequence", "Megatron-Bridge", "Levanter", "maxtext")


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
