"""Rows that another tool has packed are refused wherever examples are read; other keys are not."""

from __future__ import annotations

import re
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.collators.test_keys import READERS
from tests.command import run_command
from torch_collate_kit import (
    PackedCollator,
    PaddedCollator,
    PerToken,
    RolloutCollator,
    TokenizedDataset,
    audit,
    packing_report,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.rl import merge_steps

IDS = [5, 6, 7, 8, 9]
ROW = {"input_ids": IDS, "labels": IDS}
ROLLOUT = {"prompt_ids": IDS[:3], "response_ids": IDS[3:], "rewards": 1.0, "loss_mask": [1, 1]}
MASK, POSITIONS = "attention_mask is {} at token {}, ", "position_ids is {} at token {}, "

EVERYWHERE = READERS | {
    "rollouts": lambda rows: RolloutCollator(0)([ROLLOUT | _others(row) for row in rows]),
    "packed rollouts": lambda rows: PackedCollator(0, max_tokens=8)(
        [ROLLOUT | _others(row) for row in rows]
    ),
    "merging": lambda rows: merge_steps(
        [ROLLOUT | {"uid": 1, "is_last_step": True} | _others(row) for row in rows]
    ),
    "audit": lambda rows: audit(rows, None),
    "audit of a table": lambda rows: audit(datasets.Dataset.from_list(rows), None),
    "report": lambda rows: packing_report(rows, [16], show=False),
    "report of a table": lambda rows: packing_report(
        datasets.Dataset.from_list(rows), [16], show=False
    ),
    "report of columns": lambda rows: packing_report(
        {key: [row[key] for row in rows] for key in rows[0]}, [16], show=False
    ),
}


def _others(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ROW}


@pytest.mark.parametrize("read", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention_mask", [1, 1, 1, 2, 2], MASK.format(2, 3)),
        ("attention_mask", [7, -3, 1, 1, 1], MASK.format(7, 0)),
        ("attention_mask", [1.0, 0.5, 1.0, 1.0, 1.0], MASK.format(0.5, 1)),
        ("attention_mask", [1, 1, 1, 2, 0], MASK.format(2, 3)),
        ("attention_mask", [True, True, True, True, False], "attention_mask contains a 0"),
        ("position_ids", [0, 1, 2, 0, 1], POSITIONS.format(0, 3)),
        ("position_ids", [1, 2, 3, 4, 5], POSITIONS.format(1, 0)),
        ("seq_lengths", [3, 2], "has 'seq_lengths': another tool has packed documents"),
        ("packing_params", {"sequence_boundaries": [0, 3, 5]}, "has 'packing_params': "),
        ("segment_ids", [0, 0, 0, 1, 1], "has 'segment_ids': "),
    ],
)
def test_they_are_refused_by_name(read, key, value, words):
    with pytest.raises(DataError) as caught:
        read([ROW | {key: value}] * 2)
    assert words in str(caught.value)
    advice = "tokenize without padding" if "contains" in words else "give each document as an "
    assert advice in str(caught.value)


# what tools write, as DataCollatorWithFlattening, axolotl, torchtune, NeMo, llm-foundry, maxtext
_NAMES = """seq_lens seq_lens_padded sequence_lengths packed_seq_lengths cu_seqlens cu_seq_lens
cu_seq_lens_q cu_seqlens_kv cu_seqlens_unpadded seq_start_id seq_boundaries seq_idx sequence_id
sequence_ids segment_ids decoder_segment_ids inputs_segmentation targets_segmentation input_pos
inputs_position decoder_positions positions document_ids doc_ids doc_lens max_doc_lens doc_offsets
cumulative_len cu_doc_lens packed_seq_params seqLengths lengths boundaries"""


def test_every_spelling_of_boundaries_is_refused_in_lists_arrays_and_columns():
    collate = PaddedCollator(0)
    for key in re.findall(r"\w+", _NAMES):
        for value in ([3, 2], np.array([3, 2]), torch.tensor([3, 2])):
            for examples in ([ROW, ROW | {key: value}], {"input_ids": [IDS], key: [value]}):
                with pytest.raises(DataError, match=f"example . has '{key}': another tool has"):
                    collate(examples)
    with pytest.raises(DataError, match="example 0 has 'seq_lens': "):
        collate({"input_ids": torch.tensor([IDS]), "seq_lens": torch.tensor([[3, 2]])})


OTHERS: dict[str, Any] = {
    "attention_mask": [True] * 5, "position_ids": np.arange(5), "doc_id": "a", "length": 5,
    "document_id": 3, "seq_len": np.int64(5), "sequence_id": torch.tensor(3), "seq_lengths": None,
    "doc_ids": ["a", "b"], "text": "x", "token_type_ids": [0] * 5, "offset_mapping": [(0, 1)] * 5,
    "special_tokens_mask": [0] * 5, "consequence": [1, 2], "image_sizes": [[2, 2]],
    "start_positions": [1], "prompt_lengths": [3],
}  # fmt: skip


def test_other_keys_are_left_alone():
    for rows in ([ROW | OTHERS] * 2, {key: [value] * 2 for key, value in (ROW | OTHERS).items()}):
        assert len(PaddedCollator(0)(rows)) == 2
    assert len(RolloutCollator(0)([ROLLOUT | OTHERS])) == 1
    table = datasets.Dataset.from_list([ROW | {"position_ids": [*range(5)], "doc_id": 3}] * 2)
    assert TokenizedDataset(table).column_names == ["input_ids", "labels", "position_ids"]
    only = [{"input_ids": IDS, "position_ids": [*range(5)]}]  # which says nothing of targets
    assert PaddedCollator(0)(only).metadata["num_loss_tokens"] == 4
    pair = {"input_ids": [IDS, IDS[:2]], "loss_mask": [[0, 1, 1, 1, 1], [0, 1]]}
    pair |= {"position_ids": [[*range(5)], [0, 1]]}
    assert len(PackedCollator(0, max_tokens=8)([pair])) == 1
    pair["position_ids"] = [[*range(5)], [5, 6]]
    with pytest.raises(DataError, match="example 0, segment 1: position_ids is 5 at token 0"):
        PackedCollator(0, max_tokens=8)([pair])


def test_a_declared_field_of_such_a_name_is_carried_along():
    fields = {"segment_ids": PerToken(torch.int64)}
    rows = [ROW | {"segment_ids": [0, 0, 0, 1, 1]}]
    assert PackedCollator(0, max_tokens=8, fields=fields)(rows)["segment_ids"].tolist() == [
        [0, 0, 0, 1, 1]
    ]
    dataset = TokenizedDataset(rows, columns=["input_ids", "labels", "segment_ids"])
    assert "segment_ids" in PaddedCollator(0, fields=fields)(dataset[:])


def test_the_commands_refuse_them(tmp_path, capsys):
    path = str(tmp_path / "rows.jsonl")
    datasets.Dataset.from_list([ROW | {"seq_lengths": [3, 2]}] * 2).to_json(path)
    for command in (["report", path], ["audit", path]):
        assert run_command(*command) == 2
        assert "has 'seq_lengths': another tool has packed" in capsys.readouterr().err
