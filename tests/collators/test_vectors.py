"""Several numbers per token or example, as a teacher's likeliest ids: ``shape=(k,)``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from torch_collate_kit import (
    Batch,
    DataError,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    RolloutCollator,
    TokenizedDataset,
    unpack,
)
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import micro_batches, stage_mini_batches, unstage

TOP = {
    "ids": PerToken(torch.int32, pad=-1, shape=(2,)),
    "logps": PerToken(torch.float32, shape=(2,)),
}


def distilled() -> list[dict[str, Any]]:
    """Examples with a teacher's two likeliest tokens; the numbers say where they belong."""
    found: list[dict[str, Any]] = []
    for i, length in enumerate((3, 1, 4, 2, 5)):
        ids = [[100 * i + t, t] for t in range(length)]
        logps = [[-0.5 * t, -float(i)] for t in range(length)]
        tokens = list(range(1, length + 1))
        found.append({"input_ids": tokens, "labels": tokens, "ids": ids, "logps": logps})
    return found


def table(rows: list[dict[str, Any]], vector: Callable[[Any], Any] = pa.list_) -> Any:
    """The examples as a table whose vectors have a list type."""
    ids = pa.list_(pa.int64())
    top = {"ids": pa.list_(vector(pa.int32())), "logps": pa.list_(vector(pa.float64()))}
    columns = {k: [row[k] for row in rows] for k in rows[0]}
    return pa.table(columns, pa.schema({"input_ids": ids, "labels": ids, **top}))


def sliced_inside(rows: list[dict[str, Any]], *, fixed: bool) -> Any:
    """The table with vectors, and their numbers, that are slices of longer arrays."""
    made = table(rows)
    offsets = np.cumsum([0, *(len(row["ids"]) for row in rows)]).tolist()
    for place, name in ((2, "ids"), (3, "logps")):
        numbers = [number for row in rows for vector in row[name] for number in vector]
        kind = made.schema.field(name).type.value_type.value_type
        values = pa.array([99] * 5 + numbers, kind).slice(3)
        vectors: Any = pa.ListArray.from_arrays(list(range(0, len(values) + 1, 2)), values)
        if fixed:
            vectors = pa.FixedSizeListArray.from_arrays(values, 2)
        made = made.set_column(place, name, pa.ListArray.from_arrays(offsets, vectors.slice(1)))
    return made


ARROW_FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "lists": table,
    "large": partial(table, vector=pa.large_list),
    "fixed": lambda rows: table(rows, lambda kind: pa.list_(kind, 2)),
    "chunks": lambda rows: pa.concat_tables([table(rows)[:2], table(rows)[:0], table(rows)[2:]]),
    "slice": lambda rows: pa.concat_tables([table(rows)] * 3)[len(rows) : 2 * len(rows)],
    "inner slices": partial(sliced_inside, fixed=False),
    "fixed inner slices": partial(sliced_inside, fixed=True),
    "dataset": datasets.Dataset.from_list,
    "Array2D": lambda rows: datasets.Dataset.from_list(rows).cast_column(
        "logps", datasets.Array2D((None, 2), "float64")
    ),
    "pandas": lambda rows: table(rows).to_pandas(),
    "examples": list,
}


@pytest.mark.parametrize("form", ARROW_FORMS)
def test_vectors_in_tables_are_read_in_place(form: str) -> None:
    rows = distilled()
    collate = PackedCollator(0, max_tokens=8, fields=TOP)
    source, order = ARROW_FORMS[form](rows), [4, 0, 3, 3]
    assert collate(source) == collate(rows)
    dataset = TokenizedDataset(source, columns=list(rows[0]))
    for each in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert collate(each[:]) == collate(rows)
        assert collate(each.__getitems__(order)) == collate([rows[i] for i in order])
        assert each[2]["ids"].tolist() == rows[2]["ids"]
    stream = PackedIterableDataset(dataset, collate, batch_rows=1, buffer_size=9)
    found = [row for batch in stream for row in batch["ids"].reshape(-1, 2).tolist()]
    wanted = [vector for row in rows for vector in row["ids"]]
    assert sorted(vector for vector in found if vector != [-1, -1]) == sorted(wanted)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[[1, 2]], [[1, 2], [3]]], r"row 1: ids\[1\] has 1 numbers, the first token .* has 2; g"),
        ([[[]], [[], []]], r"row 0: ids\[0\] has 0 numbers, .*; give every token the same number"),
        ([[[1, 2]], [[1, 2], None]], "row 1: ids is null or holds a null; drop the row"),
        ([[[1, 2]], [[1, 2], [3, None]]], "row 1: ids is null or holds a null; drop the row"),
        ([[[1, 2]], None], "row 1: ids is null or holds a null; drop the row"),
        ([[["a"]], [["a"], ["b"]]], "Arrow type .*; a column holds one list of numbers per"),
    ],
)
def test_wrong_vectors_in_tables(ids: Any, message: str) -> None:
    source = pa.table({"input_ids": [[1], [2, 3]], "ids": ids})
    with pytest.raises(DataError, match=message):
        TokenizedDataset(source, columns=["input_ids", "ids"]).__getitems__([0, 1])


def test_vectors_of_rollouts_are_staged_and_trimmed() -> None:
    rollouts = []
    for i, (prompt, response) in enumerate([(2, 3), (4, 1), (1, 2)]):
        own = {"prompt_ids": [1] * prompt, "response_ids": [2] * response, "rewards": 1.0}
        ids = [[100 * i + t, t] for t in range(prompt + response)]
        rollouts.append({**own, "loss_mask": [1] * response, "ids": ids, "top": ids[prompt:]})
    fields = {"ids": TOP["ids"], "top": PerResponseToken(torch.int64, shape=(2,))}
    batch = RolloutCollator(0, fields=fields)(rollouts)
    staged = stage_mini_batches(batch, [0, 3], dp_size=2)
    for name, count in (("ids", 5), ("top", 3)):
        assert batch[name].shape == (3, count, 2)
        assert torch.equal(unstage(staged, [[part[name] for part in staged[0]]]), batch[name])
        parts = micro_batches(staged[0][0], max_tokens=5)
        assert sum(int((part[name] > 0).sum()) for part in parts) == sum(
            int((row > 0).sum()) for row in staged[0][0][name]
        )
    found = unpack(batch["ids"], batch)
    assert [row.tolist() for row in found] == [rollout["ids"] for rollout in rollouts]


def test_uneven_vectors_in_a_table_are_named() -> None:
    columns = {"input_ids": [[1], [2, 3]], "labels": [[1], [2, 3]], "logps": [[[1.0, 2.0]]] * 2}
    source = pa.table({**columns, "logps": [[[1.0, 2.0]], [[1.0, 2.0], [3.0]]]})
    collate = PackedCollator(0, max_tokens=8, fields={"logps": TOP["logps"]})
    with pytest.raises(DataError, match=r"example 1: logps\[1\] has 1 entries, and the field's sh"):
        collate(source)


def test_undeclared_they_are_not_guessed() -> None:
    rows = [{key: row[key] for key in ("input_ids", "labels", "ids")} for row in distilled()]
    assert "ids" not in PackedCollator(0, max_tokens=8)(table(distilled()))
    collate = PackedCollator(0, max_tokens=8, fields={"ids": PerToken(torch.int32)})
    message = r"example 0: ids\[0\] is \[0, 0\], so ids is nested; .*; for .* declare shape=\(2,\)$"
    with pytest.raises(DataError, match=message):
        collate(rows)
    with pytest.raises(DataError, match=r"0: ids is 2-D with shape .* declare shape=\(2,\)$"):
        collate([{**row, "ids": np.array(row["ids"])} for row in rows])


def test_a_rank_without_examples_has_vectors_and_explain_shows_them() -> None:
    layout = ParallelLayout(dp=2)
    collate = PackedCollator(0, max_tokens=8, fields=TOP, parallel=layout, normalize_loss=False)
    [part] = PackedBatchSampler(np.array([3]), collate, batch_size=1, dp_rank=1)
    empty = collate(part.with_examples([]))
    assert (empty["ids"].shape, empty["logps"].shape) == ((1, 3, 2), (1, 3, 2))
    assert (empty["ids"] == -1).all()
    shown = collate(distilled()[:1]).explain(0)
    assert shown.columns["ids"] == [[0, 0], [1, 1], [2, 2]]
    assert "[-0.5, 0]" in str(shown)
    assert "[-0.5, 0]" in shown._repr_html_()


# --- Several numbers per example, such as the log-probs of a reference: ``PerExample(shape=(k,))``


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
