"""Rows that other tools have packed become the documents that are in them."""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.loading.dataset.packed_forms import (
    FORMS,
    SHIFTED,
    Document,
    drawn,
    trl_bfd,
    unpacked,
    wanted,
)
from tests.loading.dataset.write_packed_samples import DOCUMENTS
from torch_collate_kit import PackedCollator, PackedIterableDataset, PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import unpack_dataset
from torch_collate_kit.testing import assert_exact_resume

SAMPLES = json.loads(Path(__file__).with_name("packed_samples.json").read_text())


def as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def as_documents(found: Any) -> list[Document]:
    """Return ids and which of them are trained."""
    documents = []
    for row in found:
        if "labels" in row:
            trained = [label != -100 for label in row["labels"]]
            own = [label for label in row["labels"] if label != -100]
            assert own == [i for i, t in zip(row["input_ids"], trained, strict=True) if t]
        else:
            trained = [weight != 0 for weight in row["loss_mask"]]
        documents.append((row["input_ids"], trained))
    return documents


def without_odd(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    odd = ("packing_params", "max_length_q", "max_length_k")
    return [{k: of for k, of in row.items() if k not in odd} for row in documents]


def test_every_form_becomes_its_documents():
    for name, (write, shifted) in FORMS.items():
        for seed in range(8):
            rows = drawn(np.random.default_rng(seed))
            packed = [write(row) for row in rows]
            truth, _ = unpacked(packed, shifted=name in SHIFTED)
            columns = unpack_dataset(as_columns(packed), shifted=shifted)
            assert columns == as_columns(without_odd(truth)), name
            found = [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
            assert as_documents(found) == wanted(rows), name


def test_samples_that_the_tools_wrote_themselves():
    """Rows of packed_samples.json; llm-foundry leaves bins over that are not full."""
    for name, packed in SAMPLES.items():
        columns = unpack_dataset(as_columns(packed), shifted="bridge" in name or None)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found, truth = sorted(as_documents(rows)), sorted(wanted([DOCUMENTS]))
        if "foundry" in name:
            truth = [of for of in truth if of in found]
        assert found == truth, name
        assert len(found) >= 14, name


@pytest.mark.parametrize("name", FORMS)
def test_datasets_of_every_form_and_their_counts(name, monkeypatch):
    monkeypatch.setattr("torch_collate_kit.loading.dataset.foreign_rows._ROWS_AT_A_TIME", 5)
    write, shifted = FORMS[name]
    packed = [write(row) for row in drawn(np.random.default_rng(9), 23)]
    given = datasets.Dataset.from_list(packed).shuffle(seed=1)
    truth, left_out = unpacked(list(given), shifted=name in SHIFTED)
    found, counts = unpack_dataset(given, shifted=shifted)
    assert list(found) == without_odd(truth)
    assert counts == left_out
    assert found._indices is None
    kept = {"tokens": "input_ids", "inputs": "input_ids"}
    kept |= {"targets": "labels", "loss_weight": "loss_mask"}
    kinds = {kept.get(k, k): of for k, of in given.features.items()}
    assert found.features == {k: kinds[k] for k in found.column_names}


def test_the_example_of_the_page():
    ids, mask = [11, 12, 13, 21, 22, 0], [1, 1, 1, 2, 2, 0]
    for labels in ([11, -100, 13, 21, 22, -100], [-100, 13, -100, 22, -100, -100]):
        row = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        found = unpack_dataset(as_columns([row]))
        assert found["input_ids"] == [[11, 12, 13], [21, 22]]
        assert found["labels"] == [[-100, -100, 13], [-100, 22]]


def test_columns_per_token_are_cut_and_values_per_row_repeated():
    row = {
        "input_ids": [5, 6, 7, 8, 0],
        "attention_mask": [1, 1, 2, 2, 0],
        "loss_mask": [1.0, 0.5, 0.25, 2.0, 0.0],
        "teacher": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [0.0, 0.0]],
        "token_type": [3, 4, 5, 6, 0],
        "weight": 0.5,
        "source": "web",
        "tags": ["a", "b"],
    }
    found, counts = unpack_dataset(datasets.Dataset.from_list([row]))
    assert counts == Counter(padding=1)
    assert list(found) == [
        {"input_ids": [5, 6], "loss_mask": [0.0, 0.5], "teacher": [[1.0, 2.0], [3.0, 4.0]],
         "token_type": [3, 4], "weight": 0.5, "source": "web", "tags": ["a", "b"]},
        {"input_ids": [7, 8], "loss_mask": [0.0, 2.0], "teacher": [[5.0, 6.0], [7.0, 8.0]],
         "token_type": [5, 6], "weight": 0.5, "source": "web", "tags": ["a", "b"]},
    ]  # fmt: skip


def test_an_end_token_ends_documents_of_joined_rows():
    rows = [{"input_ids": [5, 6, 2, 7, 8]}, {"input_ids": [9, 2, 2, 4, 5]}]
    found = unpack_dataset(as_columns(rows), end_id=2)
    assert found == {"input_ids": [[5, 6, 2], [7, 8], [9, 2], [4, 5]]}
    truth, counts = unpacked(rows, end_id=2)
    assert found == as_columns(truth)
    assert unpack_dataset(datasets.Dataset.from_list(rows), end_id=2)[1] == counts
    assert counts == Counter(untrained=1)


def test_lengths_may_leave_pads_that_are_named():
    row = {"input_ids": [5, 6, 7, 8, 0, 0], "seq_lengths": [2, 2]}
    found = unpack_dataset(as_columns([row]), pad_id=0)
    assert found == {"input_ids": [[5, 6], [7, 8]]}
    assert found == as_columns(unpacked([row], pad_id=0)[0])
    with pytest.raises(DataError, match=r"row 0: seq_lengths is \[2, 2\], .* the row's 6 tokens"):
        unpack_dataset(as_columns([row]), pad_id=8)


@pytest.mark.parametrize("form", ["list", "numpy", "torch", "arrow"])
def test_a_stream_of_packed_rows(form):
    rows = drawn(np.random.default_rng(3), 40)
    packed = datasets.Dataset.from_list([FORMS["Megatron-Bridge"][0](row) for row in rows])

    def stream() -> Any:
        found = packed.to_iterable_dataset(num_shards=4)
        found = found if form == "list" else found.with_format(form)
        # of tables datasets removes columns after the function
        names = None if form == "arrow" else list(packed.column_names)
        unpack = partial(unpack_dataset, shifted=True)
        return found.map(unpack, batched=True, batch_size=5, remove_columns=names)

    found = [
        row.to_pylist()[0]
        if form == "arrow"
        else {k: np.asarray(of).tolist() for k, of in row.items()}
        for row in stream()
    ]
    assert as_documents(found) == wanted(rows)
    if form != "list":
        return

    def batches_of() -> Any:
        collate = PackedCollator(0, max_tokens=32)
        return PackedIterableDataset(stream(), collate, batch_rows=2, shuffle=True, buffer_size=20)

    assert_exact_resume(batches_of, num_steps=12, stops=range(0, 12, 3))
    batches = [*batches_of()]
    assert sum(batch.metadata["num_loss_tokens"] for batch in batches) == sum(
        sum(trained) for _, trained in wanted(rows)
    )


def test_documents_are_packed_anew_by_our_collators():
    row = FORMS["axolotl"][0](drawn(np.random.default_rng(0))[0])
    for key in ("attention_mask", "position_ids"):
        given = {"input_ids": row["input_ids"], key: row[key]}
        with pytest.raises(DataError, match=r"loading\.unpack_dataset"):
            PaddedCollator(0)([given])
    found = unpack_dataset(as_columns([row]))
    assert len(PackedCollator(0, max_tokens=64)(found)["input_ids"]) == 1


IDS = [5, 6, 7, 8]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no kind": ({"input_ids": IDS}, {}, "nothing in the columns .* end_id"),
    "an end before the row's": ({"input_ids": IDS, "seq_lengths": [2, 1]}, {}, r"row 1: seq_lengths is \[2, 1\], .* 4 tokens"),
    "an end after the row's": ({"input_ids": IDS, "seq_lengths": [2, 3]}, {}, "row 1: seq_lengths"),
    "a negative length": ({"input_ids": IDS, "seq_lengths": [6, -2]}, {}, "row 1: seq_lengths"),
    "a huge length": ({"input_ids": IDS, "seq_lengths": [2**62, 2**62]}, {}, "row 1: seq_lengths"),
    "no length": ({"input_ids": IDS, "seq_lengths": []}, {}, "row 1: seq_lengths"),
    "starts that do not begin": ({"input_ids": IDS, "seq_start_id": [1, 2]}, {}, "row 1: seq_start_id"),
    "starts that fall": ({"input_ids": IDS, "seq_start_id": [0, 3, 2]}, {}, "row 1: seq_start_id"),
    "a start outside": ({"input_ids": IDS, "seq_start_id": [0, 9]}, {}, "row 1: seq_start_id"),
    "offsets that end early": ({"input_ids": IDS, "cu_seq_lens_q": [0, 2, 3]}, {}, "row 1: cu_seq_lens_q"),
    "one offset": ({"input_ids": IDS, "cu_seq_lens_q": [0]}, {}, "row 1: cu_seq_lens_q"),
    "real over padded": ({"input_ids": IDS, "seq_lens": [3, 2], "seq_lens_padded": [2, 2]}, {}, "row 1: seq_lens"),
    "real and padded differ": ({"input_ids": IDS, "seq_lens": [4], "seq_lens_padded": [2, 2]}, {}, "row 1: seq_lens"),
    "kinds that disagree": (
        {"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "position_ids": [0, 1, 2, 0]}, {},
        "row 1, token [23]: a document begins here by (position_ids, and not by attention_mask|attention_mask, and not by position_ids)",
    ),
    "lengths and positions": (
        {"input_ids": IDS, "seq_lengths": [1, 3], "position_ids": [0, 1, 0, 1]}, {},
        "row 1, token [12]: a document begins here by",
    ),
    "numbers that fall": ({"input_ids": IDS, "attention_mask": [1, 2, 1, 1]}, {}, "row 1, token 2: attention_mask is 1 after 2"),
    "pads that are 0": ({"input_ids": IDS, "segment_ids": [1, 2, 0, 0]}, {}, "row 1, token 2: segment_ids is 0 after 2; rename it to attention_mask"),
    "a pad inside": ({"input_ids": IDS, "attention_mask": [1, 0, 1, 2]}, {}, "row 1, token 2: attention_mask is 1 after 1"),
    "below the pad": ({"input_ids": IDS, "segment_ids": [7, 7, 7, -3]}, {}, "row 1, token 3: segment_ids is -3, below -1"),
    "pads that disagree": (
        {"input_ids": IDS, "attention_mask": [1, 1, 1, 0], "sequence_id": [0, 0, -1, -1]}, {},
        "row 1, token 2: a pad by one of attention_mask and sequence_id alone",
    ),
    "a target of another length": (
        {"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "labels": [5, 6, 7]}, {},
        "row 1: labels has 3 entries, input_ids has 4",
    ),
    "a number for each document": (
        {"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "rewards": [0.5, 1.0]}, {},
        "row 1: rewards has 2 entries, input_ids has 4; .* remove rewards",
    ),
    "labels of something else": (
        {"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "labels": [1, 1, 1, 1]}, {},
        r"row 1, token 0: labels are neither ids nor next ids \(here 1\)",
    ),
    "shifted labels said to be unshifted": (
        {"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "labels": [6, -100, 8, -100]},
        {"shifted": False}, r"row 1, token 0: labels are the next ids .*shifted=True fits",
    ),
    "unshifted labels said to be shifted": (
        {"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "labels": IDS},
        {"shifted": True}, "row 1, token 0: labels are the ids .*shifted=False fits",
    ),
    "labels that are both": (
        {"input_ids": [5, 5, 5, 5], "attention_mask": [1, 1, 2, 2], "labels": [5, 5, 5, 5]}, {},
        "labels are both .* pass shifted=",
    ),
    "a mask of NeMo": ({"input_ids": IDS, "seq_start_id": [0, 2], "loss_mask": [1, 0, 1, 0]}, {}, "pass shifted=True"),
    "a mask of Levanter": ({"tokens": IDS, "segment_ids": [0, 0, 1, 1], "loss_weight": [1.0, 0, 1, 0]}, {}, "pass shifted=True"),
    "images": ({"input_ids": IDS, "seq_lengths": [2, 2], "pixel_values": [[1.0]]}, {}, "no images.* remove .'pixel_values'"),
    "two targets": ({"input_ids": IDS, "seq_lengths": [2, 2], "labels": IDS, "loss_mask": [1] * 4}, {}, "at most one loss target"),
    "ids twice": ({"input_ids": IDS, "tokens": IDS, "seq_lengths": [2, 2]}, {}, "each column once"),
    "no ids": ({"seq_lengths": [2, 2]}, {}, "packed rows have input_ids"),
    "a null": ({"input_ids": [5, None, 7, 8], "seq_lengths": [2, 2]}, {}, "row 0: input_ids is null or has a null"),
    "a null row": ({"input_ids": IDS, "seq_lengths": None}, {}, "row 0: seq_lengths is null"),
    "texts": ({"input_ids": list("abcd"), "seq_lengths": [2, 2]}, {}, "input_ids holds"),
    "numbers, not lists": ({"input_ids": 5, "seq_lengths": 1}, {}, r"row 0: input_ids .* is no list \(int"),
    "half a length": ({"input_ids": IDS, "seq_lengths": [1.5, 2.5]}, {}, "seq_lengths must hold whole numbers"),
    "no number as a length": ({"input_ids": IDS, "seq_lengths": [2.0, float("nan")]}, {}, "seq_lengths must hold whole numbers"),
    "lengths as text": ({"input_ids": IDS, "seq_lengths": ["2", "2"]}, {}, "seq_lengths must hold whole numbers: it holds string"),
    "lengths in lists": ({"input_ids": IDS, "seq_lengths": [[2], [2]]}, {}, "seq_lengths must hold whole numbers: it holds list"),
    "flags as lengths": ({"input_ids": IDS, "seq_lengths": [True] * 4}, {}, "seq_lengths must hold whole numbers: it holds bool"),
    "half a number": ({"input_ids": IDS, "attention_mask": [0.5, 0.5, 1, 1]}, {}, r"row 0, token 0: attention_mask is 0\.5"),
    "no number": ({"input_ids": IDS, "segment_ids": [0, 0, 1, float("nan")]}, {}, "row 0, token 3: segment_ids is nan"),
    "pads of one column": ({"input_ids": IDS, "attention_mask": [1, 1, 2, 2], "sequence_id": [0, 0, -1, -1]}, {}, "row 0, token 2: a pad by one of attention_mask and sequence_id alone"),
    "positions as text": ({"input_ids": IDS, "position_ids": list("0101")}, {}, "position_ids holds"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_row_and_the_way_out(row, options, message):
    first = dict(row)
    if "row 1" in message:  # a good row before it
        good = {"labels": [-100] * 4, "seq_lengths": [2, 2], "seq_start_id": [0, 2],
                "cu_seq_lens_q": [0, 2, 4], "attention_mask": [1, 1, 2, 2], "rewards": [0.0] * 4,
                "position_ids": [0, 1, 0, 1], "segment_ids": [0, 0, 1, 1],
                "sequence_id": [0, 0, 1, 1], "seq_lens": [2, 2], "seq_lens_padded": [2, 2]}  # fmt: skip
        first = {k: good.get(k, IDS) for k in row}
        if {"attention_mask", "sequence_id"} <= set(row):
            first["sequence_id"] = [0, 0, 1, 1]
    rows = [first, row] if first != row else [row]
    for given in (as_columns(rows), datasets.Dataset.from_list(rows)):
        with pytest.raises(DataError, match=message):
            unpack_dataset(given, **options)


def test_rows_that_nothing_divides(caplog):
    """In a stream they may be the last batch; a whole dataset of them is refused."""
    row = {"input_ids": IDS, "attention_mask": [1, 1, 1, 0]}
    assert unpack_dataset(as_columns([row, row]))["input_ids"] == [IDS[:3]] * 2
    assert "of 2 rows: attention_mask is at most 1" in caplog.text
    with pytest.raises(DataError, match=r"attention_mask is at most 1.* pass end_id"):
        unpack_dataset(datasets.Dataset.from_list([row]))
    rows = [{"input_ids": IDS, "attention_mask": [1, 1, 2, 2]}] * 1000 + [row]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    mapped = stream.map(unpack_dataset, batched=True, remove_columns=stream.column_names)
    assert len(list(mapped)) == 2001


@pytest.mark.parametrize("dtype", [pa.uint8(), pa.uint16(), pa.float32()])
def test_positions_and_labels_of_any_dtype(dtype):
    positions, ids = [*range(256)] * 2, [*range(1, 513)]
    table = pa.table(
        {
            "input_ids": [ids],
            "position_ids": pa.array([positions], pa.list_(dtype)),
            "labels": pa.array([ids], pa.list_(pa.uint16())),
        }
    )
    found = unpack_dataset(table, shifted=False)
    assert [len(of) for of in found["input_ids"].to_pylist()] == [256, 256]
    assert found["labels"].to_pylist()[1] == [-100, *ids[257:]]
    lengths = unpack_dataset({"input_ids": [IDS], "seq_lengths": [[2.0, 2.0]]})
    assert lengths["input_ids"] == [IDS[:2], IDS[2:]]


def test_wrong_arguments():
    row = as_columns([trl_bfd(drawn(np.random.default_rng(0))[0])])
    for options in ({"shifted": 1}, {"end_id": "x"}, {"pad_id": True}, {"num_proc": "2"}):
        with pytest.raises(TypeError):
            unpack_dataset(row, **options)
    with pytest.raises(TypeError, match=r"stream\.map\(unpack_dataset"):
        unpack_dataset(datasets.Dataset.from_dict(row).to_iterable_dataset())
    with pytest.raises(DataError, match="0 rows"):
        unpack_dataset(datasets.Dataset.from_dict({"input_ids": [], "seq_lengths": []}))
    for empty in ({"input_ids": [], "seq_lengths": []}, pa.table({"input_ids": []})):
        with pytest.raises(DataError, match="0 rows"):
            unpack_dataset(empty)
    with pytest.raises(DataError, match="input_ids does not hold one list of numbers per row: Py"):
        unpack_dataset({"input_ids": [[2**63, 1]], "attention_mask": [[1, 1]]})
    nothing = {"input_ids": [[5, 6]], "seq_lengths": [[1, 1]]}
    with pytest.raises(DataError, match="no document of the 1 rows is trained"):
        unpack_dataset(datasets.Dataset.from_dict(nothing))
    assert unpack_dataset(pa.table(nothing)).num_rows == 0


def test_dtypes_stay_and_nothing_given_is_changed():
    ids = [np.array([5, 6, 7, 8], np.int32)]
    given = {"input_ids": ids, "loss_mask": [torch.tensor([1, 1, 1, 1])], "seq_lengths": [[2, 2]]}
    assert unpack_dataset(given)["loss_mask"] == [[0, 1], [0, 1]]
    assert given["loss_mask"][0].tolist() == [1, 1, 1, 1]
    table = pa.table({"input_ids": pa.array(ids), "seq_lengths": [[2, 2]]})
    assert unpack_dataset(table).column("input_ids").type == pa.list_(pa.int32())


@pytest.fixture
def pack_dataset():
    return pytest.importorskip("trl.data_utils", reason="no TRL").pack_dataset


def documents() -> list[dict[str, Any]]:
    rows = [document for row in drawn(np.random.default_rng(4), 30) for document in row]
    return [
        {"input_ids": ids, "completion_mask": [int(t) for t in trained]}
        for ids, trained in rows
        if any(trained[1:])
    ]


def bare(rows: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and masks without first targets, in an order of their own."""
    return sorted((row["input_ids"], [0, *row["completion_mask"][1:]]) for row in rows)


def test_bfd_of_trl(pack_dataset):
    rows = documents()
    packed = pack_dataset(datasets.Dataset.from_list(rows), 16, "bfd")
    found, counts = unpack_dataset(packed)
    assert bare(found) == bare(rows)
    assert not counts


def test_bfd_split_of_trl_stays_split(pack_dataset):
    rows = documents()
    packed = pack_dataset(datasets.Dataset.from_list(rows), 6, "bfd_split")
    found, counts = unpack_dataset(packed)
    pieces = [
        {name: of[start : start + 6] for name, of in row.items()}
        for row in rows
        for start in range(0, len(row["input_ids"]), 6)
    ]
    trained = [row for row in pieces if any(row["completion_mask"][1:])]
    assert bare(found) == bare(trained)
    assert counts == {"untrained": len(pieces) - len(trained)}


def test_wrapped_of_trl_needs_an_end_token(pack_dataset):
    rows = datasets.Dataset.from_list([{"input_ids": [*of["input_ids"], 2]} for of in documents()])
    packed = pack_dataset(rows, 64, "wrapped")
    with pytest.raises(ValueError, match="pass end_id"):
        unpack_dataset(packed)
    found, _ = unpack_dataset(packed, end_id=2)
    whole = [row["input_ids"] for row in rows]
    ids = [row["input_ids"] for row in found]
    assert sum(of in whole for of in ids) > len(whole) - 2 * len(packed)


@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}]
)
def test_the_collator_of_transformers(options):
    rows = documents()
    labelled = [
        {
            "input_ids": of["input_ids"],
            "labels": [i if t else -100 for i, t in zip(*of.values(), strict=True)],
        }
        for of in rows
    ]
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    batches = [collate(labelled[i : i + 4]) for i in range(0, len(rows), 4)]
    names = [name for name in batches[0] if not name.startswith("max_length")]
    columns = {name: [np.ravel(batch[name]).tolist() for batch in batches] for name in names}
    found, _ = unpack_dataset(datasets.Dataset.from_dict(columns))
    assert found["input_ids"][:] == [row["input_ids"] for row in rows]
    assert found["labels"][:] == [[-100, *row["labels"][1:]] for row in labelled]
