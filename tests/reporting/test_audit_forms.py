"""The forms of a dataset that audit takes, and rows that no collator takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from tests.reporting.clean_data import TEMPLATE, as_labels, chat, rows_like, serious, word_tokenizer
from tests.vision.families import FAMILIES
from torch_collate_kit import ChatOptions, DataError, TokenizedDataset, audit
from torch_collate_kit.chat import windows
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

ROWS = [*rows_like(5), {**chat([30], [31]), "loss_mask": [0] * 6}, rows_like(2)[1]]
EXPECTED = {"no_trained_token": [5], "duplicates": [1, 6]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def forms(folder: Path) -> dict[str, Any]:

    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(folder / "rows.parquet")
    return {
        "list": ROWS,
        "tuple": tuple(ROWS),
        "tensors": [{k: torch.tensor(v) for k, v in row.items()} for row in ROWS],
        "columns": {key: Ragged.from_rows([row[key] for row in ROWS]) for key in ROWS[0]},
        "lists of columns": {key: [row[key] for row in ROWS] for key in ROWS[0]},
        "Dataset": dataset,
        "shuffled back": dataset.select(range(6, -1, -1)).select(range(6, -1, -1)),
        "Table": pa.Table.from_pylist(ROWS),
        "TokenizedDataset": TokenizedDataset(ROWS),
        "path": str(folder / "rows.parquet"),
        "labels": [as_labels(row) for row in ROWS],
        "assistant_masks": [dict(zip(("input_ids", "assistant_masks"), row.values(), strict=True))
                            for row in ROWS],
        "num_actions": [
            {"input_ids": r["input_ids"], "loss_mask": r["loss_mask"][5:], "num_actions": n - 5}
            for r, n in ((r, len(r["input_ids"])) for r in ROWS)
        ],
    }  # fmt: skip


def test_every_form_gives_the_same_report(tmp_path: Path, tokenizer: Any) -> None:
    expected = audit(ROWS, tokenizer, max_tokens=100).to_dict()
    for name, data in forms(tmp_path).items():
        report = audit(data, tokenizer, max_tokens=100)
        assert serious(report) == EXPECTED, name
        if name != "num_actions":
            assert report.to_dict() == expected, name


def test_rows_that_were_cut_before(tokenizer: Any) -> None:
    """``num_cut_tokens`` is a column of numbers; a row without it was not cut."""

    rows = [{**row, "num_cut_tokens": 3 * (i == 2)} for i, row in enumerate(rows_like())]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    rows_as = datasets.Dataset.from_list(rows)
    for data in (rows, columns, rows_as, TokenizedDataset(rows), TokenizedDataset(rows_as)):
        report = audit(data, tokenizer)
        assert serious(report) == {"eos_truncated": [2]}
        assert "so they teach the model not to stop" in report["eos_truncated"].message


def test_windows_that_end_inside_an_answer(tokenizer: Any) -> None:
    """``is_continued`` tells them from rows that stop; nothing is lost, so it is a note."""

    answer = {"input_ids": [3, 33, 8, 2, 4, *range(20, 29), 2], "loss_mask": [0] * 5 + [1] * 10}
    whole = [{**row, "is_continued": False} for row in rows_like()]
    rows = whole + windows(answer, 10)
    assert [row["is_continued"] for row in rows[6:]] == [True, True, False]
    stopped = {**chat([30], [31, 34, 35], eos=False), "is_continued": False}
    for data in (rows, datasets.Dataset.from_list(rows), TokenizedDataset(rows)):
        found = audit(data, tokenizer)["eos_truncated"]
        assert (found.severity, found.rows.tolist()) == ("note", [6, 7])
        lost = "2 of 9 rows lose the end of their answer, which another window has (2), so nothing"
        assert lost in found.message
    assert audit(rows, tokenizer).ok
    found = audit([*rows, stopped], tokenizer)["eos_truncated"]
    assert (found.severity, found.rows.tolist()) == ("warning", [6, 7, 9])
    words = "as they stop without EOS or which another window has (2), so they teach"
    assert words in found.message
    other = {**answer, "input_ids": [*answer["input_ids"][:10], 34, 35, 36, 37, 2]}
    report = audit([*rows, *windows(other, 10)], tokenizer)  # goes on otherwise after one token
    assert report.names == ["duplicates", "eos_truncated"]
    segments = [windows(row, 10, as_segments=True) for row in (*rows_like(), answer)]
    found = audit(segments, tokenizer)["eos_truncated"]
    assert (found.severity, found.rows.tolist()) == ("note", [6])


def test_a_template_that_writes_no_end_after_the_last_answer() -> None:
    """As GLM-4.5, whose next role ends an answer: half of the rows need not show it."""
    tokenizer = word_tokenizer(TEMPLATE.replace(" <eos> ", " "))
    rows = []
    for i in range(6):
        ids = [3, 7, 4, 20 + i, 3, 8, 4, 30 + i, 9]
        rows.append({"input_ids": ids, "loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 1]})
    found = audit(rows, tokenizer)["eos_truncated"]
    assert (found.severity, found.rows.tolist()) == ("warning", [*range(6)])
    assert "as the chat template writes none, and tokenize_chat does (6), so they" in found.message
    ended = [{"input_ids": [*r["input_ids"], 3], "loss_mask": [*r["loss_mask"], 1]} for r in rows]
    assert "eos_truncated" not in audit(ended, tokenizer).names
    documents = [{"input_ids": [10 + i, 11, 12], "loss_mask": [0, 1, 1]} for i in range(6)]
    assert "eos_truncated" not in audit(documents, tokenizer).names


def test_many_rows_are_read_in_parts(tokenizer: Any) -> None:
    rows: list[dict[str, Any]] = rows_like(1) * 9000
    for i in (4095, 4096, 8999):
        rows[i] = {**rows[i], "loss_mask": [0] * 8}
    report = audit(rows, tokenizer)
    assert report["no_trained_token"].rows.tolist() == [4095, 4096, 8999]
    assert report["duplicates"].count == report.num_rows == 9000


# What the readers refuse is a finding with their message, and the other rows are looked at.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask that is short": ({"loss_mask": [0, 1]}, "row 2: loss_mask has 2 entries, input_ids"),
    "a float id": ({"input_ids": [1.5] * 8}, "row 2: input_ids[0] is 1.5"),
    "a negative id": ({"input_ids": [-5] * 8}, "row 2: input_ids is -5 at token 0"),
    "no token": ({"input_ids": [], "loss_mask": []}, "row 2 is empty"),
    "a negative weight": ({"loss_mask": [-1.0] * 8}, "row 2: loss_mask is -1.0 at token 0"),
    "nan": ({"loss_mask": [float("nan")] * 8}, "row 2: loss_mask is nan at token 0"),
    "padded": ({"attention_mask": [0] + [1] * 7}, "row 2: attention_mask contains a 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_refused(name: str, tokenizer: Any) -> None:
    change, message = REFUSED[name]
    rows = [dict(row) for row in ROWS]
    if "attention_mask" in change:
        rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    rows[2] |= change
    report = audit(rows, tokenizer)
    assert serious(report) == {"refused": [2], **EXPECTED}
    assert message in report["refused"].message
    assert "1 of 7 rows" in report["refused"].message
    assert report["refused"].example.startswith("row 2")
    assert report.num_rows == 7


def test_nulls_are_refused_and_the_other_rows_are_looked_at(tokenizer: Any) -> None:

    rows: list[dict[str, Any]] = [dict(row) for row in ROWS]
    rows[3] = {"input_ids": None, "loss_mask": None}
    for data in (datasets.Dataset.from_list(rows), pa.Table.from_pylist(rows)):
        report = audit(data, tokenizer)
        assert serious(report) == {"refused": [3], **EXPECTED}
        assert "row 3: input_ids is null or holds a null" in report["refused"].message
    report = audit([None, *ROWS], tokenizer)
    assert serious(report)["refused"] == [0]
    assert "row 0 is a NoneType; an example is a mapping" in report["refused"].message
    chats = audit([None, record("w7", "w20"), 5], tokenizer)
    assert serious(chats) == {"refused": [0, 2]}
    assert "row 0: a record is a mapping, such as one with messages, got None" in str(chats)


def record(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


DICTS = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
WORDS = {"tokenizer": word_tokenizer()}
UNREADABLE: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, DataError, r"the dataset is empty \(0 rows\); give at least one"),
    ([{"input_ids": [5, 6], "loss_maks": [0, 1]}], {}, DataError,
     "row 0 has no loss_mask, but 'loss_maks' looks like it"),
    ([{"input_ids": [5, 6], "id": 3}], {}, DataError, "pass train_all=True to train every token"),
    ((row for row in ROWS), {}, TypeError, "dataset is a generator; pass a list of examples"),
    (DICTS, {}, TypeError, r"dataset is a DatasetDict; pass .*\(of a DatasetDict one"),
    (ROWS, {"tokenizer": 0}, TypeError, "tokenizer must be a tokenizer or a processor, got int"),
    ([{"messages": []}], {}, ValueError, "which need a tokenizer; pass the tokenizer"),
    ([record("Hi", "Yes")], {**WORDS, "chat": ChatOptions(image_root="images")}, ValueError,
     r"max_pixels are for images, .* pass the processor"),
    (ROWS, {"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "options", "error", "message"), UNREADABLE)
def test_data_that_cannot_be_read_at_all(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        audit(data, **options)


def test_chat_records(tokenizer: Any) -> None:

    texts = (("w7", "w20"), ("w8", "w21", "w9", "w22"), ("w10",), ("w7", "w20"), ("w7", "w23"))
    records = [record(*of) for of in texts]
    columns = {"messages": [r["messages"] for r in records]}
    tables = datasets.Dataset.from_list(records), pa.Table.from_pylist(records)
    for data in (records, columns, *tables):
        report = audit(data, tokenizer, max_tokens=7)
        assert serious(report) == {
            "no_trained_token": [2],
            "target_truncated": [1],
            "eos_truncated": [1],
            "duplicates": [0, 3],
            "contradictory_answers": [0, 3, 4],
        }
        assert report.num_rows == 5
        assert "1 of 5 rows" in report["no_trained_token"].message


def test_chat_records_that_are_refused(tokenizer: Any) -> None:
    bad = {"messages": [{"role": "narrator", "content": "w7"}]}
    report = audit([record("w7", "w20"), bad], tokenizer)
    assert serious(report) == {"refused": [1]}
    assert "row 1: " in report["refused"].message
    only = audit([bad, record("w8")], tokenizer)
    assert serious(only) == {"refused": [0], "masks_all_zero": [1]}
    assert only["masks_all_zero"].severity == "error"
    assert "none of the records, 1 of 1 row, has an answer" in only["masks_all_zero"].message
    assert only["masks_all_zero"].example == "row 1: nothing in the record would be trained"
    assert (only.num_rows, only.num_tokens) == (2, 0)


ROLLOUT = {"prompt_ids": [5], "response_ids": [6, 7], "loss_mask": [1, 1], "rewards": 0.5}


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (rows_like(4), "loss_mask"),
        ([record(f"w{i}", f"w{20 + i}") for i in range(4)], "loss_mask"),
        ([{"input_ids": [i, 6, 7]} for i in range(4)], "no loss target"),
        ([{**ROLLOUT, "prompt_ids": [i]} for i in range(4)], "rewards"),
    ],
    ids=["tokens", "chats", "no target", "rollouts"],
)
def test_rows_with_and_without_a_weight_are_two_forms(rows: Any, form: str, tokenizer: Any) -> None:
    weighted = [{**row, "weight": 0.5} for row in rows]
    assert "refused" not in audit(weighted, tokenizer).names
    assert audit(weighted, tokenizer).names == audit(rows, tokenizer).names
    report = audit([*weighted[:2], rows[2], weighted[3]], tokenizer)
    assert serious(report)["refused"] == [2]
    what = f"row 2: it has {form}, the others have {form}, weight; give every row the same keys"
    assert what in report["refused"].message
    bad = audit([*weighted[:3], {**rows[3], "weight": -1}], tokenizer)
    assert serious(bad)["refused"] == [3]
    assert "row 3: weight is -1; a weight must be finite" in bad["refused"].message


def test_a_template_that_forgets(tokenizer: Any) -> None:
    """Every row is refused, and the report says why."""
    forgetful = word_tokenizer("{% set messages = messages[-2:] %}" + TEMPLATE)
    report = audit([record("w8", "w21", "w9", "w22")] * 2, forgetful)
    assert set(serious(report)) == {"refused", "template_not_prefix_stable"}
    assert "once others follow (three turns): an" in report["template_not_prefix_stable"].message
    example = report["template_not_prefix_stable"].example
    assert example.startswith("the model is asked with '")
    assert "and trained with" in example
    one = audit([record("w8", "w21")], forgetful)
    assert one.ok, "nothing follows an answer"
    assert one["template_not_prefix_stable"].severity == "note"
    assert "template_not_prefix_stable" not in audit(ROWS, tokenizer).names


def image_row(layout: VisionLayout, tokens: int) -> dict[str, Any]:
    """An image of 4 x 4 patches, which takes 4 tokens, and an answer."""
    ids = [3, 7, *[layout.image_token_id] * tokens, 8, 9]
    row = {"input_ids": ids, "loss_mask": [0] * (len(ids) - 2) + [1, 1]}
    grid = np.array([[1, 4, 4]])
    return row | {"pixel_values": np.zeros((16, 1176), np.float32), "image_grid_thw": grid}


def test_placeholders_that_disagree_with_the_images() -> None:
    layout = VisionLayout("qwen3_vl", image_token_id=39, merge_size=2, patch_shape=(3, 2, 196))
    rows = [image_row(layout, tokens) for tokens in (4, 3, 4, 5, 1, 0)]
    rows[0]["input_ids"][-1] = 7
    report = audit(rows, vision=layout)
    assert serious(report) == {"placeholders_disagree_with_grids": [1, 3, 4, 5]}
    message = report["placeholders_disagree_with_grids"].message
    assert "row 1 has 3 image placeholders (token 39)" in message
    blind = audit(rows)
    assert blind.ok, "equal texts with images are not compared"
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    assert audit(columns).to_dict() == blind.to_dict()
    assert blind["images_not_checked"].severity == "note"


def test_chat_records_with_images() -> None:
    picture, content = (
        Image.new("RGB", (56, 56)),
        [{"type": "image"}, {"type": "text", "text": "?"}],
    )
    answers = ("A black square.", "A black square.", "A dark square.")
    processor = FAMILIES["qwen2_5_vl"].processor()
    texts = [record("Who?", answer) for answer in answers]
    asked = [{"messages": [{"role": "user", "content": content}, of["messages"][1]],
              "images": [picture]} for of in texts]  # fmt: skip
    report = audit(asked, processor)
    assert (report.num_rows, serious(report)) == (3, {})
    assert set(serious(texts, processor)) == {"duplicates", "contradictory_answers"}
