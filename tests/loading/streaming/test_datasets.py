"""A stream over a dataset reads its examples one by one, as those of any other source."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.streaming.column_sources import FORMS, SOURCES, dataset_of, examples_of, table_of
from tests.loading.streaming.streaming_oracle import SETTINGS, make_examples
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset, shards


class Doubled(TokenizedDataset):
    """Gives other rows than it holds."""

    def __getitem__(self, index: Any) -> Any:
        return {name: np.repeat(row, 2) for name, row in super().__getitem__(index).items()}


def plain() -> Any:
    return dataset_of(examples_of("loss_mask", [3, 5, 2, 4]))


OTHERS = {
    "format": lambda: plain().with_format("numpy"),
    "columns": lambda: plain().with_format(None, columns=["input_ids"]),
    "transform": lambda: plain().with_transform(lambda r: {k: [v * 2 for v in r[k]] for k in r}),
    "subclass": lambda: Doubled(table_of(examples_of("loss_mask", [3, 5, 2]))),
    "stream": lambda: plain().to_iterable_dataset(),
}
CASES = [(name, FORMS[number % len(FORMS)]) for number, name in enumerate(SOURCES)]
CASES += [("table", form) for form in FORMS] + [(name, "") for name in OTHERS]


@pytest.mark.parametrize("overflow", ["truncate", "split"])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_batches_are_those_of_the_examples(name: str, form: str, overflow: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, size=40).tolist()
    examples = examples_of(form, lengths)
    source = OTHERS[name]() if name in OTHERS else SOURCES[name](examples)
    wanted = [dict(example) for example in source] if name in OTHERS else examples
    train_all = form == "none"  # one source has a column of text
    for more in ({}, {"num_shards": 2, "dp_size": 2, "dp_rank": 1}, {"shuffle": True}):
        settings = SETTINGS | {"overflow": overflow, "train_all": train_all} | more
        found, expected = packed_stream(source, **settings), packed_stream(wanted, **settings)
        for batch, other in zip(found, expected, strict=True):
            assert_same_batch(batch, other)


def test_the_log_says_once_that_a_sampler_is_faster(caplog: Any) -> None:
    shards._log_faster_way.cache_clear()
    with caplog.at_level(logging.INFO, logger="torch_collate_kit.loading"):
        for _ in range(2):
            packed_stream(TokenizedDataset(make_examples([3, 4])), **SETTINGS)
    assert [record.getMessage() for record in caplog.records] == [
        "a stream reads a TokenizedDataset example by example; PackedBatchSampler is about twice "
        "as fast"
    ]


BAD: list[tuple[Any, Any, str]] = [
    (None, [1.0], "input_ids is null or holds a null; drop"),
    ([7], None, "loss_mask is null or holds a null"),
    ([], [], "is empty"),
    ([-5], [1.0], "input_ids is -5 at token 0"),
    ([7], [1.0, 1.0], "loss_mask has 2 entries, input_ids has 1"),
    ([7] * 30, [1.0] * 30, "has 30 tokens, more than the 12 that fit"),
]


@pytest.mark.parametrize(("ids", "weights", "message"), BAD)
def test_a_wrong_row_is_named_by_its_position(ids: Any, weights: Any, message: str) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {"input_ids": [[5]] * 9 + [ids, [6]], "loss_mask": [[1.0]] * 9 + [weights, [1.0]]}
    )
    for on_error in ("raise", "skip"):
        stream = packed_stream(TokenizedDataset(table), **SETTINGS, on_error=on_error)
        if on_error == "raise":
            with pytest.raises(DataError, match=f"example 9 of the stream:? .*{message}"):
                list(stream)
        else:
            skipped = [i for batch in stream for i in batch.metadata.get("skipped", [])]
            assert skipped == [9]
