"""Preference records that cannot be read: the row, what was found, and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from tests.chat.chats import NO_TAGS, USER, YO, byte_tokenizer
from torch_collate_kit import ChatOptions, DataError
from torch_collate_kit.preference import tokenize_preferences

Record = dict[str, Any]
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TURNS = {"prompt": [USER], "chosen": [YO], "rejected": [{**YO, "content": "no"}]}
KTO = {"prompt": "a", "completion": "b"}


def refused(rows: list[Record], message: str, error: Any = DataError, **keywords: Any) -> None:
    tokenizer = keywords.pop("tokenizer", None) or byte_tokenizer(NO_TAGS)
    keep, seed = keywords.pop("keep", None), keywords.pop("seed", 0)
    with pytest.raises(error, match=message):
        tokenize_preferences(
            Dataset.from_list(rows), tokenizer, ChatOptions(**keywords), keep=keep, seed=seed
        )


def without(record: Record, *names: str) -> Record:
    return {name: value for name, value in record.items() if name not in names}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (without(PAIR, "rejected"), "`chosen` is given without `rejected`: .* add it, remove the"),
        (without(TURNS, "chosen"), "`rejected` is given without `chosen`: .* or for KTO give"),
        ({"prompt": "a"}, r"no answers in the columns \['prompt'\]; give `chosen` and"),
        (KTO, "`completion` has no `label`; give True .* or use tokenize_chat_dataset"),
        ({"messages": [USER, YO], "label": True}, r"no answers in .*; give .* `label` \(KTO\)"),
        (PAIR | {"completion": "d"}, "`completion` are given: a pair has .*; remove `completion`"),
        (PAIR | {"label": 1}, "`rejected` and `label` are given: .*; remove `label`"),
        (PAIR | {"rejected": ""}, r"`rejected` is empty \(''\): there is nothing to prefer; give"),
        (PAIR | {"chosen": " \n"}, r"`chosen` is empty \(' \\n'\)"),
        (TURNS | {"rejected": []}, r"`rejected` is empty \(\[\]\)"),
        (TURNS | {"rejected": [{**YO, "content": ""}]}, r"`rejected`: messages\[1\] is an empty a"),
        (PAIR | {"chosen": ["b", "d"]}, "`chosen` is a list that holds 'b', .* one answer per col"),
        (PAIR | {"rejected": [YO]}, "`chosen` is a string, `rejected` is a list of messages"),
        (TURNS | {"chosen": "b", "rejected": "c"}, "a string, `prompt` is a list .* give all as"),
        (TURNS | {"chosen": YO}, "`chosen` must be a string .* of type dict; .* into a list"),
        (PAIR | {"chosen": 3}, "`chosen` must be a string or a list of messages, got 3 of type in"),
        (
            {"chosen": "b", "rejected": "c"},
            "the prompt is empty, or its .*: nothing predicts .* give a `prom",
        ),
        (without(PAIR, "prompt") | {"question": "a"}, "`chosen`, `rejected` without a `prompt`; r"),
        (
            without(TURNS, "prompt") | {"conversations": [{"from": "human", "value": "a"}]},
            "rename `conversations` to `prompt`, as messages with `role`",
        ),
        (
            {"prompt": "x", "chosen": [USER, YO], "rejected": [USER, {**YO, "content": "b"}]},
            "`prompt` 'x' is in none of the 1 messages before the answers; remove the column if",
        ),
        (PAIR | {"margin": float("nan")}, "`margin` is nan, .* finite number; remove the record"),
        (PAIR | {"margin": "big"}, "`margin` is 'big'"),
        (PAIR | {"margin": True}, "`margin` is True"),
        (PAIR | {"score_chosen": None}, "`score_chosen` is None, .* if not all records have one"),
        (PAIR | {"score_rejected": 1e300}, "`score_rejected` is 1e.300"),
        (PAIR | {"weight": -1.0}, "`chosen`: weight is -1.0; a weight must be finite"),
        (PAIR | {"system": "be kind"}, "`chosen`: .* no template renders, so `system` would be lo"),
    ],
)
def test_records(record: Record, message: str) -> None:
    refused([record], f"example 0: .*{message}")


@pytest.mark.parametrize("label", ["good", -1, 2, 0.5, float("nan")])
def test_labels(label: Any) -> None:
    refused([KTO | {"label": label}] * 2, r"example 0: `label` is .*; it is True \(or 1\) for")


def test_the_row_is_named_in_a_later_batch() -> None:
    rows = [PAIR | {"margin": float(i)} for i in range(300)]
    refused([*rows, PAIR | {"margin": float("inf")}], "example 300: `margin` is inf")
    refused([*rows, PAIR | {"prompt": None, "margin": 1.0}], "example 300: the prompt is empty")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([KTO | {"label": True}], "KTO compares each answer with that of another row, and only 1"),
        ([KTO | {"completion": None, "label": True}], r"example 0: no answers in .*'label'"),
        ([PAIR | KTO | {"label": True}], "the columns of pairs .* and of labelled answers .* remo"),
        ([PAIR | {"weights": 1.0}], "the dataset has 'weights', which is not read; name it weight"),
        ([PAIR | {"chosen": "b" * 99}], "all 1 examples are skipped: 1 with too_long; both sides"),
    ],
)
def test_datasets(rows: list[Record], message: str) -> None:
    refused(rows, message, max_length=20)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"max_length": 2, "overflow": "raise"},
            DataError,
            "example 0: `chosen` with its prompt has 4 tokens, more than max_length=2; .*='drop'",
        ),
        (
            {"overflow": "truncate"},
            ValueError,
            "overflow='truncate' does not say .* keep='prompt_en",
        ),
        (
            {"keep": "prompt_end"},
            ValueError,
            "keep='prompt_end' cuts at max_length, .* give max_le",
        ),
        (
            {"keep": "answer_start", "max_length": 4, "overflow": "drop"},
            ValueError,
            "keep='answer_start' cuts at max_length, .*; .* leave overflow out",
        ),
        ({"keep": "start"}, ValueError, "keep must be one of 'prompt_end', 'answer_start', None"),
        (
            {"train_on": "each"},
            ValueError,
            "train_on='each' makes .*; pass train_on='all' or 'last'",
        ),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
    ],
)
def test_options(options: Record, error: Any, message: str) -> None:
    refused([PAIR | {"prompt": "aa"}], message, error, **options)


def test_types() -> None:
    tokenizer: Any = byte_tokenizer(NO_TAGS)
    rows: Any = [PAIR]
    with pytest.raises(
        TypeError, match=r"expected a datasets.Dataset, got list; use Dataset.from_l"
    ):
        tokenize_preferences(rows, tokenizer)
    processor: Any = SimpleNamespace(image_processor=None, tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"reads no images.*; pass processor.tokenizer"):
        tokenize_preferences(Dataset.from_list(rows), processor)
