"""Several numbers per example, such as the log-probs of a reference: ``PerExample(shape=(k,))``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from torch_collate_kit import (
    Batch,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    PerExample,
    RolloutCollator,
    TokenizedDataset,
)
from torch_collate_kit.ragged import Ragged

PAIRS: list[dict[str, Any]] = [
    {
        "input_ids": [[1] * (1 + i % 3) + [100 + i], [1, 2, 100 + i]],
        "loss_mask": [[0] * (1 + i % 3) + [1], [0, 0, 1]],
        "ref": [-1.0 * i, -2.5 * i],
        "grade": [i, 2, -i],
    }
    for i in range(9)
]
COLUMNS = {key: [pair[key] for pair in PAIRS] for key in PAIRS[0]}
FIELDS = {
    "ref": PerExample(torch.float32, shape=(2,)),
    "grade": PerExample(torch.int16, shape=(3,)),
}
FIXED = datasets.List(datasets.Value("float64"), length=2)
FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: PAIRS,
    "columns": lambda: COLUMNS,
    "arrays": lambda: {**COLUMNS, "ref": np.array(COLUMNS["ref"])},
    "tensors": lambda: [{**pair, "grade": torch.tensor(pair["grade"])} for pair in PAIRS],
    "ragged": lambda: {**COLUMNS, "ref": Ragged.from_rows(COLUMNS["ref"])},
    "datasets": lambda: datasets.Dataset.from_list(PAIRS),
    "fixed": lambda: datasets.Dataset.from_list(PAIRS).cast_column("ref", FIXED),
}
COLLATORS = {
    "packed": PackedCollator(0, max_tokens=16, fields=FIELDS),
    "padded": PaddedCollator(0, fields=FIELDS),
}


def check(batch: Batch, count: int = len(PAIRS)) -> None:
    """Every example of the batch has its numbers, at its first segment."""
    indices, numbers = (
        np.concatenate([np.asarray(row) for row in batch.row_metadata[name]])
        for name in ("example_indices", "segment_numbers")
    )
    order = indices[numbers == 0].tolist()
    assert len(order) == count
    for name, spec in FIELDS.items():
        found = batch[name]
        assert isinstance(found, Ragged)
        assert found.values.dtype == spec.dtype
        assert found.values.tolist() == [PAIRS[i][name] for i in order]


@pytest.mark.parametrize("collate", COLLATORS.values(), ids=COLLATORS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numbers_of_every_form_stand_once_per_example(
    form: Callable[[], Any], collate: Callable[[Any], Batch]
) -> None:
    source = form()
    batch = collate(source)
    check(batch)
    check(pickle.loads(pickle.dumps(batch)))
    check(Batch.cat([batch[:2], batch[2:]]))
    check(batch.pad_rows(multiple_of=5 if len(batch) % 5 else 7))
    dataset = TokenizedDataset(source, columns=[*PAIRS[0]])
    for given in (dataset[:], [dataset[i] for i in range(len(dataset))]):
        check(collate(given))


def test_streams_and_rollouts_have_them_too() -> None:
    stream = PackedIterableDataset(PAIRS, COLLATORS["packed"], batch_rows=2)
    found = [pair for batch in stream for pair in batch["ref"].values.tolist()]
    assert sorted(found) == sorted(COLUMNS["ref"])
    turn = {"prompt_ids": [1], "response_ids": [2, 3], "rewards": 1.0, "loss_mask": [1, 1]}
    collate = RolloutCollator(0, fields={"ref": FIELDS["ref"]})
    refs = [[0.5, 2.0], [1.5, np.nan]]  # NaN of an example with fewer segments
    found = collate([turn | {"ref": ref} for ref in refs])["ref"].values
    np.testing.assert_array_equal(found, refs)


def test_a_shape_of_examples_has_one_dimension() -> None:
    with pytest.raises(ValueError, match=r"shape=\(2, 3\); an example has \(k,\) numbers"):
        PaddedCollator(0, fields={"ref": PerExample(torch.float32, shape=(2, 3))})
