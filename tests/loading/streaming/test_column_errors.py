"""Packing a stream of columns: wrong columns and wrong rows, named as one by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import EXAMPLES, SETTINGS, datasets
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset

pa = pytest.importorskip("pyarrow")


# --- wrong rows ---


def with_bad_row(kind: str) -> Any:
    """43 rows, of which 23 and 37 are wrong."""
    rows: list[Any] = [example["input_ids"] for example in EXAMPLES]
    weights: list[Any] = [[1.0] * len(row) for row in rows]
    for bad in (23, 37):
        if kind == "null row":
            rows[bad] = None
        elif kind == "null weights":
            weights[bad] = None
        elif kind == "a null":
            rows[bad] = [None] * len(rows[bad])
        elif kind == "empty":
            rows[bad], weights[bad] = [], []
        elif kind == "negative":
            rows[bad] = [-5] * len(rows[bad])
        elif kind == "nan":
            weights[bad] = [float("nan")] * len(rows[bad])
        elif kind == "lengths":
            weights[bad] = [1.0] * (len(rows[bad]) + 1)
        elif kind == "long":
            rows[bad], weights[bad] = [1] * 30, [1.0] * 30
        elif kind == "long lengths":
            rows[bad], weights[bad] = [1] * 30, [1.0] * 31
    return pa.table({"input_ids": rows, "loss_mask": weights})


@pytest.mark.parametrize(
    ("kind", "overflow", "message"),
    [
        ("null row", "raise", "example 23 of the stream: input_ids is null or holds a null; drop"),
        ("null row", "split", "example 23 of the stream: input_ids is null or holds a null; drop"),
        ("null weights", "raise", "example 23 of the stream: loss_mask is null or holds a null"),
        ("a null", "raise", "example 23 of the stream: input_ids is null or holds a null"),
        ("empty", "raise", "example 23 of the stream is empty"),
        ("empty", "split", "example 23 of the stream is empty"),
        ("negative", "raise", "example 23 of the stream: input_ids is -5 at token 0"),
        ("nan", "raise", "example 23 of the stream.*nan"),
        ("lengths", "raise", r"example 23 of the stream: loss_mask has \d entries, input_ids has"),
        ("lengths", "split", r"example 23 of the stream: loss_mask has \d entries, input_ids has"),
        ("long", "raise", "example 23 of the stream has 30 tokens, more than the 12 that fit"),
        ("long lengths", "split", "example 23 of the stream: loss_mask has 31 entries, input_ids"),
    ],
)
@pytest.mark.parametrize("shard", [{}, {"dp_rank": 1, "dp_size": 2}])
def test_a_wrong_row_is_named_by_its_position(
    kind: str, overflow: str, message: str, shard: dict[str, int]
) -> None:
    table = with_bad_row(kind)
    settings = SETTINGS | shard | {"overflow": overflow, "buffer_size": 20}
    num_given_out = []
    for source in (
        datasets.Dataset(datasets.table.InMemoryTable(table)),
        TokenizedDataset(table),
        table.to_pylist(),
    ):
        found: list[Any] = []
        pattern = "23 of the stream" if isinstance(source, list) else message
        with pytest.raises(DataError, match=pattern):
            found.extend(packed_stream(source, **settings))
        num_given_out.append(len(found))
    assert num_given_out[0] == num_given_out[1] >= num_given_out[2]  # no earlier than one by one


@pytest.mark.parametrize("buffer_size", range(1, 9))
@pytest.mark.parametrize("bad", [None, [], [1] * 13])
def test_a_wrong_row_behind_what_is_needed_waits(buffer_size: int, bad: Any) -> None:
    """As many batches come before the error as from the examples, whatever they are split into."""
    rows = [[1] * 5, [2] * 26, [3] * 4, [4] * 17, [5] * 30, [6] * 2, bad, [7]]
    masks = [row if row is None else row + [1] * (len(row) == 13) for row in rows]
    table = pa.table({"input_ids": rows, "labels": masks})
    settings = SETTINGS | {"overflow": "split", "max_tokens": 6, "buffer_size": buffer_size}
    counts = []
    for source in (TokenizedDataset(table), table.to_pylist()):
        found: list[Any] = []
        with pytest.raises(DataError, match="example 6 of the stream"):
            found.extend(packed_stream(source, **settings))
        counts.append(len(found))
    assert counts[0] == counts[1]
