"""Batch.explain: every token with all that the dense fields say of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_samples import APART, KINDS, loose, masked_examples
from tests.command import byte_tokenizer
from tests.rollout_strategies import draw_batch
from tests.strategies import FUZZ
from torch_collate_kit.batch import Batch, PerExample
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.packing import ParallelLayout

TOKENIZER = byte_tokenizer("<|im_end|>")


def test_a_packed_row() -> None:
    batch = PackedCollator(9, max_tokens=16, parallel=ParallelLayout(dp=2, tp=4))(masked_examples())
    assert str(batch.explain(0)) == (
        "row 0 of 2: 12 tokens in 16 cells, 7 trained\n"
        "cell  example  segment   id  position  label  weight\n"
        "   0        0        0    1         0      -       -\n"
        "   1        0        0    2         1      2     0.5\n"
        "   2        0        0    3         2      -       -\n"
        "   3        0        0    4         3      4       1\n"
        "   4        0        0    5         4      5     0.5\n"
        "... 3 cells of padding\n"
        "   8        4        1  401         0      -       -\n"
        "   9        4        1  402         1    402       1\n"
        "  10        4        1  403         2    403     0.5\n"
        "  11        4        1  404         3      -       -\n"
        "  12        4        1  405         4    405       1\n"
        "  13        4        1  406         5    406     0.5\n"
        "  14        4        1  407         6      -       -\n"
        "... 1 cell of padding"
    )
    assert repr(batch.explain(0)) == str(batch.explain(0))


def test_text_shows_what_is_invisible_and_parts_of_characters() -> None:
    ids = TOKENIZER("a \u20ac\n\u200b|<|im_end|>")["input_ids"]
    batch = PaddedCollator(0)([{"input_ids": [*ids, 9999]}])
    assert batch.explain(0, TOKENIZER).to_dict()["text"] == [
        *("'a'", "' '", r"b'\xe2'", r"b'\x82'", r"b'\xac'", r"'\n'"),
        *(r"b'\xe2'", r"b'\x80'", r"b'\x8b'", "'|'", "'<|im_end|>'", "?"),
    ]
    lines = str(batch.explain(0, TOKENIZER)).splitlines()
    assert lines[1] == "cell  example    id  text          position  label  weight"
    assert lines[2] == "   0        0    64  'a'                  0      -       -"
    assert lines[-1] == "  11        0  9999  ?                   11   9999       1"


def test_long_rows_show_head_and_tail() -> None:
    batch = PaddedCollator(0)([{"input_ids": [*range(1, 4001)]}, {"input_ids": [1]}])
    lines = str(batch.explain(0)).splitlines()
    assert len(lines) == 2 + 60 + 1
    assert lines[32] == "... 3,940 more tokens"
    assert lines[31].split()[:3] == ["29", "0", "30"]
    assert lines[33].split()[:3] == ["3970", "0", "3971"]
    assert len(str(batch.explain(0, max_tokens=None)).splitlines()) == 4002
    assert str(batch.explain(0, max_tokens=1)).splitlines()[2:] == [
        "   0        0   1         0      -       -",
        "... 3,999 more tokens",
    ]
    assert str(batch.explain(1)).splitlines()[2] == "... 3,999 cells of padding"
    assert [row["id"] for row in batch.explain(0, start=5, stop=8).records()] == [6, 7, 8]
    assert len(str(batch.explain(0, start=5, stop=8)).splitlines()) == 2 + 3
    assert len(batch.explain(0)) == 4000
    assert batch.explain(0, start=-3).to_dict()["cell"] == [3997, 3998, 3999]


def test_one_example_of_a_row() -> None:
    batch = KINDS["packed"]()
    for example in range(5):
        found = batch.explain(example=example).to_dict()
        assert found["id"] == masked_examples()[example]["input_ids"]
        assert set(found["example"]) == {example}
    assert "padding" not in str(batch.explain(0, example=4))
    assert str(batch.explain(0, example=4)).splitlines()[0] == (
        "row 0 of 3: 7 tokens in 8 cells, 4 trained, example 4 of it"
    )
    split = PackedCollator(0, max_tokens=4, overflow="split")([{"input_ids": [1, 2, 3, 4, 5, 6]}])
    assert split.explain(1, example=0).to_dict()["id"] == [5, 6]
    assert split.explain(-1, example=0).to_dict()["id"] == [5, 6]


def test_a_batch_built_from_tensors() -> None:
    built = Batch({"input_ids": torch.tensor([[5, 6, 7]]), "rewards": torch.tensor([[0.5, 1.0]])})
    assert (
        str(built.explain(0))
        == "row 0 of 1: 3 tokens in 3 cells\ncell  id\n   0   5\n   1   6\n   2   7"
    )
    one = Batch({"input_ids": torch.tensor([[5]])})
    assert one.explain(0).title == "row 0 of 1: 1 token in 1 cell"
    masked = built.with_fields(loss_mask=torch.tensor([[0.0, 2.0]]))
    assert masked.explain(0).records()[2] == {"cell": 2, "id": 7, "weight": 2.0, "rewards": 1.0}


def test_html() -> None:
    page = KINDS["left"]().explain(0, TOKENIZER)._repr_html_()
    assert page.count("<tr") == 1 + 1 + 5
    assert page.count("font-weight:bold") == 3, "trained tokens"
    assert "<i>... 2 cells of padding</i>" in page
    ids = TOKENIZER("<b>")["input_ids"]
    assert "'&lt;'" in PaddedCollator(0)([{"input_ids": ids}]).explain(
        0, TOKENIZER
    )._repr_html_().replace("&#x27;", "'")


def test_the_weight_and_the_names_of_an_example_are_shown() -> None:
    collators = [
        PackedCollator(0, max_tokens=8, fields={"source": PerExample(str)}),
        PaddedCollator(0, fields={"source": PerExample(str), "id": PerExample(str)}),
    ]
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6], "labels": [-100, 6], "weight": 0.5, "source": "code", "id": "x"},
        {"input_ids": [7, 8, 9], "labels": [-100, 8, 9], "weight": 2, "source": "chat", "id": "y"},
    ]
    for collate in collators:
        batch = collate(rows)
        found = [record for row in range(len(batch)) for record in batch.explain(row).records()]
        shown = sorted((record["id"], record["weight"], record["source"]) for record in found)
        codes, chats = [(5, 0, "code"), (6, 0.5, "code")], [(7, 0, "chat"), (8, 2, "chat")]
        assert shown == [*codes, *chats, (9, 2, "chat")]
    assert [record["field id"] for record in found] == ["x", "x", "y", "y", "y"]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda b: b.explain(3), IndexError, "row 3 of a batch with 3 rows"),
    (lambda b: b.explain(-4), IndexError, "row -4 of a batch with 3"),
    (lambda b: b.explain(), TypeError, "needs a row, or the example to look for"),
    (lambda b: b.explain(example=9), ValueError, "example 9 is not in 3 rows o"),
    (lambda b: b.explain(0, example=0), ValueError, "example 0 is not in row 0 of"),
    (lambda b: b.explain(0, "gpt2"), TypeError, "tokenizer must have decode(), go"),
    (lambda b: b.explain(0, max_tokens=0), ValueError, "at least 1, got 0; None shows all tokens"),
    (lambda b: loose().explain(0), ValueError, "no input_ids [R, W] to explain; it has"),
    (lambda b: loose().explain(0, example=1), ValueError, 'row_metadata["example_indices"]'),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_explained_is_refused(call: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call(KINDS["packed"]())


def check_against_the_fields(batch: Batch, row: int) -> None:
    """Every cell by itself, from the dense fields."""
    records = {record["cell"]: record for record in batch.explain(row).records()}
    divisor = batch.metadata["loss_mask_divisor"]
    width = batch["input_ids"].shape[1]
    hidden = width - batch.metadata["response_length"]
    real = batch["attention_mask"][row].tolist()
    assert sorted(records) == [cell for cell in range(width) if real[cell]]
    for cell, record in records.items():
        assert record["id"] == batch["input_ids"][row, cell]
        assert record["position"] == batch["position_ids"][row, cell]
        if "labels" in batch:
            assert record["label"] == batch["labels"][row, cell]
        weight = batch["loss_mask"][row, cell - hidden].item() * divisor if cell >= hidden else 0
        assert record["weight"] == pytest.approx(weight, rel=1e-5)
        for name in {"rewards", "rollout_logprobs", "advantages", "reference"} & {*batch}:
            in_response = cell >= hidden
            expected = batch[name][row, cell - hidden].item() if in_response else 0
            assert record[name] == expected or (record[name] is None and expected == 0)
        if "type" in batch:
            assert record["type"] == batch["type"][row, cell]
        examples = batch.row_metadata["example_indices"][row].tolist()
        assert record["example"] in (*examples, None)


@pytest.mark.parametrize("kind", list(APART))
def test_it_says_what_the_fields_say(kind: str) -> None:
    batch = KINDS[kind]().pad_rows(multiple_of=4)
    for row in range(len(batch)):
        check_against_the_fields(batch, row)
    assert batch.explain(0).records() == batch[:1].explain(0).records()
    made = batch._made.keys()
    KINDS[kind]().explain(0)
    assert batch._made.keys() == made


@FUZZ
@given(st.data())
def test_any_packed_batch_can_be_explained(data: st.DataObject) -> None:
    batch = draw_batch(data, "packed")
    row = data.draw(st.integers(0, len(batch) - 1))
    check_against_the_fields(batch, row)
    explanation = batch.explain(row, max_tokens=data.draw(st.integers(1, 9)))
    assert explanation._repr_html_().count("<tr") <= 2 + 9 * 2 + 1
    assert str(explanation).startswith(f"row {row} of {len(batch)}: ")
