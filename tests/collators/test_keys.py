"""Every token is trained only where nothing else can be meant, or where it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.building import packed_stream
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset

IDS = [5, 6, 7]
UNDERSTOOD = (
    "known keys are input_ids, loss_mask, labels, assistant_masks, completion_mask, num_actions, "
    "attention_mask, position_ids, token_type_ids, weight; give one target, remove the other keys, "
    "or pass train_all=True to train every token"
)


def _streamed(rows: list[dict[str, Any]], source: Callable[[Any], Any], **options: Any) -> Batch:
    dataset = packed_stream(source(rows), tokenizer=0, max_tokens=8, **options)
    return next(iter(dataset))


def _arrow_dataset(rows: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(rows)


# what reads examples, the same way
READERS: dict[str, Callable[..., Batch]] = {
    "padded": lambda rows, **options: PaddedCollator(0, **options)(rows),
    "packed": lambda rows, **options: PackedCollator(0, max_tokens=8, **options)(rows),
    "columns": lambda rows, **options: PaddedCollator(0, **options)(
        {key: [row[key] for row in rows] for key in rows[0]}
    ),
    "stream": lambda rows, **options: _streamed(rows, list, **options),
    "stream of columns": lambda rows, **options: _streamed(rows, _arrow_dataset, **options),
    "dataset": lambda rows, **options: PaddedCollator(0)(TokenizedDataset(rows, **options)[:]),
    "arrow": lambda rows, **options: PaddedCollator(0)(
        TokenizedDataset(_arrow_dataset(rows), **options)[:]
    ),
}
readers = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def message_of(read: Callable[..., Batch], rows: list[dict[str, Any]], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(rows, **options)
    return str(caught.value)


@readers
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_weights", [0.0, 0.0, 1.0]),
        ("prompt_length", 2),
        ("assistant_tokens_mask", [0, 0, 1]),
    ],
)
def test_beside_another_key_it_must_be_said(read, key, value):
    rows = [{"input_ids": IDS, key: value}] * 2
    message = message_of(read, rows)
    assert f" has {key!r} and no loss target, so it is not clear whether every token " in message
    assert message.endswith(UNDERSTOOD)
    batch = read(rows, train_all=True)
    assert batch.metadata["num_loss_tokens"] in (2, 4)  # a stream gives out rows one by one


@readers
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss_maks", "loss_mask"),
        ("Loss_Mask", "loss_mask"),
        ("lables", "labels"),
        ("asistant_masks", "assistant_masks"),
    ],
)
@pytest.mark.parametrize("train_all", [False, True])
def test_a_target_in_another_spelling_is_refused(read, key, name, train_all):
    message = message_of(read, [{"input_ids": IDS, key: [0, 0, 1]}], train_all=train_all)
    assert message.endswith(
        f" has no {name}, but {key!r} looks like it; rename it to {name}, or remove it"
    )


@readers
def test_beside_a_target_other_keys_are_left_alone_and_misspelt_ones_are_not(read):
    row = {"input_ids": IDS, "labels": [-100, -100, 7]}
    others = {"id": 3, "text": "x", "height": 4, "label": 1, "completion": "y"}
    assert read([row | others]).metadata["num_loss_tokens"] == 1  # label: labels is there
    mask = {"input_ids": IDS, "loss_mask": [0, 0, 1]}
    for key, name in {"num_action": "num_actions", "attention_masks": "attention_mask"}.items():
        message = message_of(read, [mask | {key: 1}])
        assert message.endswith(f"rename it to {name}, or remove it")


@readers
@pytest.mark.parametrize("name", ["loss_mask", "labels", "assistant_masks", "completion_mask"])
def test_a_target_and_train_all_say_two_things(read, name):
    message = message_of(read, [{"input_ids": IDS, name: [0, 1, 1]}], train_all=True)
    assert message.endswith(f" has {name}, and train_all=True trains every token; keep one of "
                            "the two")  # fmt: skip


@readers
@pytest.mark.parametrize(
    "key", ["weights", "Weight", "sample_weight", "sample_weights", "example_weight"]
)
@pytest.mark.parametrize("more", [{}, {"labels": IDS}, {"train_all": True}])
def test_the_weight_of_an_example_under_another_name_is_refused(read, key, more):
    target, options = ({}, more) if "train_all" in more else (more, {})
    for value in (0.5, [0.0, 1.0, 1.0]):
        message = message_of(read, [{"input_ids": IDS, **target, key: value}], **options)
        assert f" has {key!r}, which is not read; name it weight if it is one" in message


@readers
@pytest.mark.parametrize("target", [{}, {"labels": IDS}, {"loss_mask": [1, 1, 1]}])
def test_a_weight_says_nothing_of_what_is_trained(read, target):
    rows = [{"input_ids": IDS, **target, "weight": 0.5}, {"input_ids": [8, 9, 4], "weight": 0}]
    rows[1] |= {key: [4, 4, 4] for key in target}
    batch = read(rows)
    assert batch.metadata["num_loss_tokens"] == 2
    assert sorted({0.0, *batch["loss_mask"].view(-1).tolist()}) == [0.0, 0.25]
    assert batch["labels"][batch["labels"] != -100].tolist() == IDS[1:]


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_a_later_example_is_looked_at_too(kind):
    message = message_of(READERS[kind], [{"input_ids": IDS}] * 2 + [{"input_ids": IDS, "w": [1]}])
    assert message.startswith("example 2 has 'w' and no loss target")
    message = message_of(READERS[kind], [{"input_ids": IDS}, {"input_ids": IDS, "lables": IDS}])
    assert message.startswith("example 1 has no labels, but 'lables' looks like it")


# --- pieces, rollouts, model inputs --------------------------------------------------------------


@pytest.mark.parametrize("source", [list, _arrow_dataset, TokenizedDataset])
def test_a_piece_of_an_example_does_not_forget_its_keys(source):
    rows = [{"input_ids": list(range(1, 12)), "w": [0.0] * 11}]
    options = {"overflow": "split"}
    with pytest.raises(DataError, match=r" has 'w' and no loss target"):
        _streamed(rows, source, **options)
    if source is not TokenizedDataset:
        assert _streamed(rows, source, train_all=True, **options)["labels"].ne(-100).sum() == 7
    kept = TokenizedDataset(rows, columns=["input_ids", "w"])  # columns= keeps it, for others
    with pytest.raises(DataError, match=r"example 0 of the stream has 'w' and no loss target"):
        _streamed(rows, lambda _: kept, **options)


# --- which columns a TokenizedDataset keeps ------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("with_target", [0, 1])
def test_files_of_which_one_has_a_target(tmp_path, kind, with_target):
    """The first file decided: where it had no target, that of the second was left out."""
    paths = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for i, path in enumerate(paths):
        columns = {"input_ids": [IDS]} | ({"labels": [IDS]} if i == with_target else {})
        table = pa.table({k: pa.array(v, pa.list_(pa.int64())) for k, v in columns.items()})
        if kind == "parquet":
            pq.write_table(table, path)
            continue
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=r"1\.\w+' has the columns .*make them alike, or pass"):
        TokenizedDataset(paths)
    dataset = TokenizedDataset(paths, columns=["input_ids"])
    assert dataset.num_loss_tokens.tolist() == [2, 2]
