"""Every reader accepts every form of dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset

from tests.batch_checks import assert_same_batch
from tests.loading.dataset.dataset_oracle import ROWS, write_stream
from torch_collate_kit import audit, packing_report
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.loading import TokenizedDataset

COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
ROLLOUTS = [
    {"prompt_ids": [5], "response_ids": [6, 7], "rewards": 0.5, "loss_mask": [1, 1]},
    {"prompt_ids": [8, 9], "response_ids": [4], "rewards": 1.0, "loss_mask": [1]},
]


class MapStyle(Dataset):
    """A map-style dataset that knows nothing of this library."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def saved(rows: list[Any], folder: Path, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        return folder / "rows.parquet"
    return write_stream(folder / "rows.arrow", pa.Table.from_pylist(rows))


def chunked(rows: list[Any]) -> pa.Table:
    return pa.concat_tables([pa.Table.from_pylist([row]) for row in rows])


def formatted(kind: str | None) -> Callable[[list[Any], Path], Any]:
    return lambda rows, _: datasets.Dataset.from_list(rows).with_format(kind)


def columns(rows: list[Any]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


FORMS: dict[str, Callable[[list[Any], Path], Any]] = {
    "list": lambda rows, _: rows,
    "tuple": lambda rows, _: tuple(rows),
    "arrays": lambda rows, _: [{k: np.array(v) for k, v in row.items()} for row in rows],
    "tensors": lambda rows, _: [{k: torch.tensor(v) for k, v in row.items()} for row in rows],
    "columns": lambda rows, _: columns(rows),
    "data frame": lambda rows, _: pd.DataFrame(rows),
    "map-style dataset": lambda rows, _: MapStyle(rows),
    "table": lambda rows, _: pa.Table.from_pylist(rows),
    "chunked table": lambda rows, _: chunked([rows[0], *rows]).slice(1),
    "record batch": lambda rows, _: pa.RecordBatch.from_pylist(rows),
    "arrow file": lambda rows, folder: saved(rows, folder, "arrow"),
    "path as a string": lambda rows, folder: str(saved(rows, folder, "arrow")),
    "list of files": lambda rows, folder: [saved(rows, folder, "arrow")],
    "parquet file": lambda rows, folder: saved(rows, folder, "parquet"),
    "shuffled dataset": lambda rows, _: datasets.Dataset.from_list(rows[::-1]).select(
        range(len(rows) - 1, -1, -1)
    ),
    **{
        f"dataset as {kind}": formatted(kind)
        for kind in (None, "numpy", "torch", "arrow", "pandas")
    },
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@forms
def test_tokens_in_any_form(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = form(ROWS, tmp_path)
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=8)):
        if form is not FORMS["list of files"]:  # a list of paths is no batch
            assert_same_batch(collate(data), collate(ROWS))
    expected = [len(row["input_ids"]) for row in ROWS]
    dataset = TokenizedDataset(data)
    assert dataset.lengths.tolist() == expected
    assert [row["loss_mask"].tolist() for row in dataset] == COLUMNS["loss_mask"]
    assert packing_report(data, 8, show=False)["data"]["num_tokens"] == sum(expected)
    found, wanted = audit(data), audit(ROWS)
    assert (found.names, found.num_tokens) == (wanted.names, wanted.num_tokens)


@forms
def test_rollouts_in_any_form(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = form(ROLLOUTS, tmp_path)
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        if form is not FORMS["list of files"]:
            assert_same_batch(collate(data), collate(ROLLOUTS))
    assert packing_report(data, 8, show=False)["data"]["num_tokens"] == 6
    assert audit(data).num_tokens == 6


def test_a_tokenized_dataset_in_every_reader() -> None:
    data = TokenizedDataset(ROWS)
    for collate in (PaddedCollator(0), PackedCollator(0, max_tokens=8)):
        assert_same_batch(collate(data), collate(ROWS))
    assert TokenizedDataset(data, columns=["input_ids"]).column_names == ["input_ids"]
    assert packing_report(data, 8, show=False)["data"]["num_tokens"] == 13
    assert audit(data).num_tokens == 13


@pytest.mark.parametrize("read", [PaddedCollator(0), TokenizedDataset, audit, packing_report])
@pytest.mark.parametrize("data", [7, None, b"ab"])
def test_no_form_of_dataset(read: Any, data: Any) -> None:
    with pytest.raises(TypeError, match=r"is an? \w+; pass .*a list of examples, a mapping of col"):
        read(data)
