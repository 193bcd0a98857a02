"""The checks of rows against plain loops over tokens, on drawn datasets."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.reporting.audit_words import BOS, EOS, PAD, word_tokenizer
from tests.reporting.clean_data import with_target
from tests.strategies import FUZZ
from torch_collate_kit import audit

USER, HEADER = 3, 4
TOKENIZERS = {pad: word_tokenizer(pad=pad) for pad in ("<pad>", "<eos>")}
TOKEN = st.sampled_from([PAD, BOS, EOS, EOS, 3, HEADER, 7, 8, 9, 45])
Row = dict[str, list[int]]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Short rows of few different tokens, so that all defects are frequent."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        if found and draw(st.integers(0, 4)) == 0:
            found.append(dict(draw(st.sampled_from(found))))
            continue
        ids = draw(st.lists(TOKEN, min_size=1, max_size=10))
        prompt = draw(st.integers(0, len(ids)))
        mask = [0] * prompt + [1] * (len(ids) - prompt)
        if draw(st.booleans()):
            mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        found.append({"input_ids": ids, "loss_mask": mask})
    return found


def trained(row: Row) -> list[int]:
    """Places, without the first token, which nothing predicts."""
    return [i for i, kept in enumerate(row["loss_mask"]) if kept and i > 0]


def is_full(row: Row) -> bool:
    return len(row["input_ids"]) > 1 and len(trained(row)) == len(row["input_ids"]) - 1


def trains_header(row: Row) -> bool:
    return not is_full(row) and any(row["input_ids"][i] == HEADER for i in trained(row))


def has_two_bos(row: Row) -> bool:
    return row["input_ids"][:2] == [BOS, BOS]


def has_no_such_id(row: Row) -> bool:
    return any(token >= 40 for token in row["input_ids"])


def trains_pad(row: Row, pad: int) -> bool:
    ids = row["input_ids"]
    if pad != EOS:
        return any(ids[i] == pad for i in trained(row))
    first = len(ids)
    while first > 0 and ids[first - 1] == pad:
        first -= 1
    return any(i > first for i in trained(row))


def is_padded(row: Row, pad: int) -> bool:
    ids, kept = row["input_ids"], trained(row)
    if len(ids) < 3:
        return False
    return (ids[:2] == [pad, pad] and 1 not in kept) or (
        ids[-2:] == [pad, pad] and len(ids) - 1 not in kept
    )


def ends_question(ids: list[int], i: int) -> bool:
    """Whether the last header, or end, before the end at ``i`` is the header of the user."""
    return next((t for t in reversed(ids[:i]) if t in (USER, HEADER, EOS)), None) == USER


def misses_end(row: Row) -> bool:
    ids, kept = row["input_ids"], trained(row)
    return any(
        ids[i] == EOS and ids[i - 1] != EOS and i - 1 in kept and i not in kept
        for i in range(1, len(ids))
        if not ends_question(ids, i)
    )


def cut_of(row: Row, limit: int) -> str | None:
    """What is lost of the target, by the name of its finding."""
    kept = trained(row)
    if not kept or len(row["input_ids"]) <= limit or kept[-1] < limit:
        return None
    return "prompt_longer_than_row" if kept[0] >= limit else "target_truncated"


def expected(data: list[Row], pad: int, limit: int) -> dict[str, list[int]]:
    """Rows by finding, for the checks that look at one row at a time."""
    some = any(map(trained, data))
    by_row: dict[str, Any] = {
        "no_trained_token": lambda row: some and not trained(row),
        "masks_all_zero": lambda row: not some,
        "generation_prompt_trained": trains_header,
        "double_bos": has_two_bos,
        "id_out_of_vocabulary": has_no_such_id,
        "pad_trained": lambda row: trains_pad(row, pad),
        "padded_rows": lambda row: is_padded(row, pad),
        "target_truncated": lambda row: cut_of(row, limit) == "target_truncated",
        "prompt_longer_than_row": lambda row: cut_of(row, limit) == "prompt_longer_than_row",
        "duplicates": lambda row: sum(row["input_ids"] == o["input_ids"] for o in data) > 1,
    }
    any_end = any(row["input_ids"][i] == EOS for row in data for i in trained(row))
    by_row["eos_masked_as_pad"] = lambda row: pad == EOS and misses_end(row)
    by_row["eos_not_trained"] = lambda row: pad != EOS and any_end and misses_end(row)
    by_row["eos_never_trained"] = lambda row: not any_end and bool(trained(row))
    return {name: [i for i, row in enumerate(data) if of(row)] for name, of in by_row.items()}


@given(rows(), st.sampled_from(["<pad>", "<eos>"]), st.integers(1, 9), st.booleans())
@settings(FUZZ)
def test_rows_are_those_that_a_loop_finds(
    data: list[Row], pad: str, limit: int, as_labels: bool
) -> None:
    tokenizer, pad_id = TOKENIZERS[pad], PAD if pad == "<pad>" else EOS
    examples = [with_target(row, "labels") for row in data] if as_labels else data
    report = audit(examples, tokenizer, max_tokens=limit)
    truth = expected(data, pad_id, limit)
    found = {f.name: f.rows.tolist() for f in report.findings if f.name in truth}
    assert found == {name: rows for name, rows in truth.items() if rows}
    for finding in report.findings:
        if finding.count:
            assert finding.example.startswith(f"row {finding.rows[0]}: "), finding
