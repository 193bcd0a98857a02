"""Common first mistakes: each gets one line that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import delitem, setitem
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from torch_collate_kit import (
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    PrefetchingSampler,
    RolloutCollator,
    TokenizedDataset,
    audit,
    packing_report,
    token_loss,
)

ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 4
DATASET, COLLATE = TokenizedDataset(ROWS), PackedCollator(0, max_tokens=8)
BATCH, LOGITS = COLLATE(ROWS[:2]), torch.zeros(1, 6, 8)
SAMPLERS = [PackedBatchSampler(DATASET, COLLATE, batch_size=2), PrefetchingSampler(4, batch_size=2)]
PADDED = PaddedCollator(0)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
READERS: list[Callable[[Any], Any]] = [
    PADDED, COLLATE, TokenizedDataset, partial(audit, tokenizer=None), packing_report
]  # fmt: skip
STREAMS = [
    PackedIterableDataset(ROWS, of, buffer_size=4) for of in (COLLATE, COLLATE.for_trainer())
]


def batch_of(dataset: Any, **options: Any) -> Any:
    return next(iter(DataLoader(dataset, **options)))


def refused(call: Callable[[], Any], words: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("collate", [PADDED, COLLATE.for_trainer()])
def test_trainer_over_a_tokenized_dataset(collate):
    """Its RemoveColumnsCollator iterates over what a dataset returns."""
    call = partial(batch_of, DATASET, batch_size=2, collate_fn=lambda of: collate([*of]))
    words = "transformers.Trainer iterates over columns of a TokenizedDataset: give it PackedRows("
    refused(call, words, ValueError)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", [DATASET, ROWS, Mixture([DATASET, DATASET])])
def test_batch_samplers_as_samplers(sampler, dataset):
    call = partial(batch_of, dataset, sampler=sampler, collate_fn=PADDED)
    refused(call, "DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)", TypeError)


def test_streams_with_a_batch_size():
    for stream in STREAMS:
        for options in ({"batch_size": 8}, {}, {"batch_size": 8, "collate_fn": COLLATE}):
            words = "DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)"
            refused(partial(batch_of, stream, **options), words, TypeError)
    refused(lambda: PADDED([BATCH]), "example 0 is a Batch; it is collated already", ValueError)


RECORDS: list[dict[str, Any]] = [
    {"messages": MESSAGES}, {"prompt": "a", "completion": "b"}, MESSAGES[0], {"text": "a"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_records_that_are_not_tokenized(record):
    words = (
        "tokenize the text first (chats by tokenize_chat_dataset or tokenize_chat, pairs by pref"
    )
    for read in (PADDED, COLLATE, TokenizedDataset):
        refused(lambda of=read: of([record]), words, ValueError)


LOSS = "pass the loss tokens of the step, as global_num_loss_tokens(micro_batches) returns them"
LABEL = "or if it is one number declare fields={'label': PerExample(torch.int64)}"
LABELLED = [{"input_ids": [5, 6], "label": 1}]
CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: token_loss(LOGITS, BATCH), TypeError, LOSS),
    (lambda: token_loss(LOGITS, BATCH["labels"]), TypeError, LOSS),
    (lambda: BATCH.cuda(), AttributeError, 'batch.to("cuda") moves it'),
    (lambda: BATCH.cpu(), AttributeError, 'batch.to("cuda") moves it'),
    (lambda: BATCH.copy(), AttributeError, "dict(batch) reads"),
    (lambda: BATCH.pop("labels"), AttributeError, "with_fields() replaces"),
    (lambda: BATCH.update(x=1), AttributeError, "with_fields() replaces"),
    (lambda: BATCH.labels, AttributeError, 'a field is an item, batch["labels"]'),
    (lambda: setitem(BATCH, "labels", LOGITS), TypeError, "batch.with_fields(labels=tensor)"),
    (lambda: delitem(BATCH, "labels"), TypeError, "fields of a Batch stay"),
    (lambda: PADDED(LABELLED), ValueError, LABEL),
    (lambda: TokenizedDataset(LABELLED), ValueError, LABEL),
    (lambda: RolloutCollator(0)([{"messages": MESSAGES}]), ValueError, "a rollout has prompt_ids"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_one_line_says_what_to_write(call, error, words):
    refused(call, words, error)
