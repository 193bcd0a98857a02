"""Rows packed by the tools themselves: TRL and transformers."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
from transformers import DataCollatorWithFlattening

from tests.loading.dataset.packed_forms import drawn
from torch_collate_kit.loading import unpack_dataset

pack_dataset = pytest.importorskip("trl.data_utils", reason="no TRL").pack_dataset


def documents() -> list[dict[str, Any]]:
    rows = [document for row in drawn(np.random.default_rng(4), 30) for document in row]
    return [
        {"input_ids": ids, "completion_mask": [int(t) for t in trained]}
        for ids, trained in rows
        if any(trained[1:])
    ]


def bare(rows: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and masks without first targets, in an order of their own."""
    return sorted((row["input_ids"], [0, *row["completion_mask"][1:]]) for row in rows)


def test_bfd_of_trl():
    rows = documents()
    packed = pack_dataset(datasets.Dataset.from_list(rows), 16, "bfd")
    found, counts = unpack_dataset(packed)
    assert bare(found) == bare(rows)
    assert not counts


def test_bfd_split_of_trl_stays_split():
    rows = documents()
    packed = pack_dataset(datasets.Dataset.from_list(rows), 6, "bfd_split")
    found, counts = unpack_dataset(packed)
    pieces = [
        {name: of[start : start + 6] for name, of in row.items()}
        for row in rows
        for start in range(0, len(row["input_ids"]), 6)
    ]
    trained = [row for row in pieces if any(row["completion_mask"][1:])]
    assert bare(found) == bare(trained)
    assert counts == {"untrained": len(pieces) - len(trained)}


def test_wrapped_of_trl_needs_an_end_token():
    rows = datasets.Dataset.from_list([{"input_ids": [*of["input_ids"], 2]} for of in documents()])
    packed = pack_dataset(rows, 64, "wrapped")
    with pytest.raises(ValueError, match="pass end_id"):
        unpack_dataset(packed)
    found, _ = unpack_dataset(packed, end_id=2)
    whole = [row["input_ids"] for row in rows]
    ids = [row["input_ids"] for row in found]
    assert sum(of in whole for of in ids) > len(whole) - 2 * len(packed)


@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}]
)
def test_the_collator_of_transformers(options):
    rows = documents()
    labelled = [
        {
            "input_ids": of["input_ids"],
            "labels": [i if t else -100 for i, t in zip(*of.values(), strict=True)],
        }
        for of in rows
    ]
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    batches = [collate(labelled[i : i + 4]) for i in range(0, len(rows), 4)]
    names = [name for name in batches[0] if not name.startswith("max_length")]
    columns = {name: [np.ravel(batch[name]).tolist() for batch in batches] for name in names}
    found, _ = unpack_dataset(datasets.Dataset.from_dict(columns))
    assert found["input_ids"][:] == [row["input_ids"] for row in rows]
    assert found["labels"][:] == [[-100, *row["labels"][1:]] for row in labelled]
