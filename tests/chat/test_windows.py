"""Windows of long examples: the law, the rules in it, chats, datasets, and what is refused."""

from __future__ import annotations

import logging
import os
import random
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.chat.chats import CHATML, byte_tokenizer, chat, tokenize
from torch_collate_kit import (
    ChatOptions,
    DataError,
    PackedCollator,
    audit,
    tokenize_chat,
    tokenize_chat_dataset,
)
from torch_collate_kit.chat import windows
from torch_collate_kit.preference import tokenize_preferences

ROW = {
    "input_ids": [5, 6, 7, 1, 2, 8, 3, 9, 9, 4, 4, 4],
    "loss_mask": [0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1],
}


def runs_of(weights: list[Any]) -> list[tuple[int, int]]:
    """The first token of each run of trained tokens, and the last + 1."""
    is_trained = [False, *(weight != 0 for weight in weights[1:]), False]
    edges = [i for i in range(1, len(is_trained)) if is_trained[i] != is_trained[i - 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_law(
    found: list[dict[str, Any]], weights: list[Any], limit: int, pinned: int, overlap: int
) -> None:
    """Compare windows of a row whose ids are its places, one token at a time, with the law."""
    kept: dict[int, Any] = {}
    runs = runs_of(weights)
    for window in found:
        places, own = window["input_ids"], window["loss_mask"]
        assert len(places) == len(own) <= limit
        body = places[pinned:]
        assert places[:pinned] == list(range(min(pinned, len(weights))))
        assert body == list(range(body[0], body[-1] + 1)) if body else pinned
        new = [i for i in range(1, len(places)) if own[i] != 0]
        assert new, "a window trains something"
        for i in new:
            assert places[i] == places[i - 1] + 1, "right after its predecessor"
            assert places[i] not in kept, "trained once"
            kept[places[i]] = own[i]
        last = places[new[-1]]
        ends_inside = (last + 1) not in [stop for _, stop in runs]
        assert window["is_continued"] == ends_inside
        if ends_inside:  # a run longer than a window fills this one, half of it with new tokens
            assert len(places) in (limit, pinned)
            assert 2 * len(new) >= limit - pinned or places[new[0]] <= pinned
        if len(weights) <= limit:
            assert places == list(range(len(weights)))
        elif not ends_inside and last + 1 != runs[-1][1]:  # the next run does not fit
            following = min(stop for start, stop in runs if start > last)
            assert following - (body[0] if body else pinned) > limit - pinned
        before = [start for start, _ in runs if start < places[new[0]]]
        if before and places[new[0]] in dict(runs) and body and len(weights) > limit:
            # begins with the answer before, or earlier ones, as far as the own one fits
            own_start, room = places[new[0]], limit - pinned
            own_end = dict(runs)[own_start]
            least = own_end - room if own_end - own_start < room else own_start - room // 2
            fitting = [start for start in before if start >= max(own_start - overlap, least)]
            assert body[0] == max([*fitting, before[-1]][0], least, pinned)
    assert kept == {i: weight for i, weight in enumerate(weights) if i and weight != 0}
    ends = {stop - 1 for _, stop in runs}
    assert ends <= kept.keys()


def random_row(rng: random.Random) -> tuple[list[Any], int, int | None, int]:
    """Weights, max_length, pinned and overlap."""
    weights, least = list[Any](), rng.randint(2, 60)
    while len(weights) < least:
        weights += [0] * rng.randint(1, 9)
        weights += [rng.choice([1, 1, 0.5, 2])] * rng.randint(1, rng.choice([3, 14]))
    weights = [*weights[:: rng.choice([1, 1, -1])], *rng.choice([[], [0], [1]])]
    weights[1:] = weights[1:] if any(weights[1:]) else [1, 1]
    first = next(i for i, weight in enumerate(weights) if i and weight)
    pinned = rng.choice([None, None, 0, rng.randint(0, len(weights))])
    least = (first if pinned is None else pinned) + 2
    limit = rng.randint(least, max(least, len(weights)))
    return weights, limit, pinned, rng.choice([0, 0, 1, 5, 40])


# ---- by hand: pinned, overlap, a run longer than a window, a row that fits

BY_HAND: dict[str, tuple[dict[str, int], list[tuple[list[int], list[int], bool]]]] = {
    "whole answers while they fit": (
        {"max_length": 9},
        [
            ([5, 6, 7, 1, 2, 8, 3], [0, 0, 0, 1, 1, 0, 1], False),
            ([5, 6, 7, 3, 9, 9, 4, 4, 4], [0, 0, 0, 0, 0, 0, 1, 1, 1], False),
        ],
    ),
    "an answer in two": (
        {"max_length": 6},
        [
            ([5, 6, 7, 1, 2], [0, 0, 0, 1, 1], False),
            ([5, 6, 7, 2, 8, 3], [0, 0, 0, 0, 0, 1], False),
            ([5, 6, 7, 9, 4, 4], [0, 0, 0, 0, 1, 1], True),
            ([5, 6, 7, 4, 4], [0, 0, 0, 0, 1], False),
        ],
    ),
    "earlier answers": (
        {"max_length": 11, "pinned": 1, "overlap": 6},
        [
            ([5, 6, 7, 1, 2, 8, 3], [0, 0, 0, 1, 1, 0, 1], False),
            ([5, 1, 2, 8, 3, 9, 9, 4, 4, 4], [0] * 7 + [1] * 3, False),
        ],
    ),
    "a row that fits": ({"max_length": 12}, [(*ROW.values(), False)]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_windows_by_hand(case: str) -> None:
    options, expected = BY_HAND[case]
    found = windows(ROW, **options)
    assert [tuple(window.values()) for window in found] == expected
    one = windows(ROW, **options, as_segments=True)
    ids, masks, flags = zip(*expected, strict=True)
    assert one == {
        "input_ids": [*ids], "loss_mask": [*masks], "is_continued": any(flags)
    }  # fmt: skip


def test_the_law_holds_on_random_rows() -> None:
    rng = random.Random(0)
    for _ in range(20_000 if "ALL_CASES" in os.environ else 1_000):
        weights, limit, pinned, overlap = random_row(rng)
        row = {"input_ids": list(range(len(weights))), "loss_mask": weights, "weight": 0.5}
        found = windows(row, limit, pinned=pinned, overlap=overlap)
        first = next(i for i, weight in enumerate(weights) if i and weight)
        check_law(found, weights, limit, first if pinned is None else pinned, overlap)
        assert all(window["weight"] == 0.5 for window in found)
        assert row["loss_mask"] is weights
        assert len(weights) == len(row["input_ids"])


def test_every_target_and_column() -> None:
    ids, mask = ROW.values()
    labels = [i if kept else -100 for i, kept in zip(ids, mask, strict=True)]
    others = {"name": "twelve tokens", "numbers": np.arange(12), "position_ids": [*range(12)]}
    shifted = {"loss_mask": mask[3:], "num_actions": 9}
    expected = windows(ROW, 9)
    for target in ({"labels": labels}, {"assistant_masks": [*map(bool, mask)]}, shifted):
        for make in (list, np.array, torch.tensor):
            row = {**others, "input_ids": make(ids)}
            row |= {k: v if k == "num_actions" else make(v) for k, v in target.items()}
            for found, wanted in zip(windows(row, 9), expected, strict=True):
                assert found["input_ids"] == wanted["input_ids"]
                name = next(iter(target))
                if name == "labels":
                    pairs = zip(
                        found["labels"], found["input_ids"], wanted["loss_mask"], strict=True
                    )
                    assert all(label == (i if kept else -100) for label, i, kept in pairs)
                else:
                    assert found[name] == wanted["loss_mask"]
                    assert {type(entry) for entry in found[name]} <= {int, bool, float}
                assert found["name"] == "twelve tokens"
                assert "num_actions" not in found
                numbers = found["numbers"]
                assert [ids[i] for i in numbers] == found["input_ids"]
                assert found["position_ids"] == [*range(len(numbers))]
    found = windows({"input_ids": [*range(9)]}, 5)  # every token is trained
    assert [window["input_ids"] for window in found] == [
        [0, 1, 2, 3, 4],
        [0, 4, 5, 6, 7],
        [0, 7, 8],
    ]


def test_segments_share_the_prompt() -> None:
    example = windows(ROW, 9, as_segments=True)
    batch = PackedCollator(0, max_tokens=32, share_prefixes=True)([example])
    assert (batch.metadata["step_num_cells"], batch.metadata["num_loss_tokens"]) == (13, 6)


def test_datasets_map() -> None:
    rows = datasets.Dataset.from_list([{**ROW, "weight": 0.5}] * 2)
    wanted = windows(rows[0], 9)
    for form in (None, "numpy", "torch"):
        options = {"max_length": 9, "as_segments": True}
        found = rows.with_format(form).map(windows, fn_kwargs=options).with_format(None)
        assert found[1] == windows(rows[0], 9, as_segments=True)

    def cut(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        examples = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        found = [window for example in examples for window in windows(example, 9)]
        return {name: [window[name] for window in found] for name in found[0]}

    assert list(rows.map(cut, batched=True, remove_columns=rows.column_names)) == wanted * 2
    with pytest.raises(
        DataError, match=r"input_ids holds 2 lists; give one .* without batched=True"
    ):
        rows.map(windows, batched=True, fn_kwargs={"max_length": 9})


# ---- chats

TALK = chat("user: hi", "assistant: yo", "user: a", "assistant: bb", "tool: ccc", "assistant: dd")
LONG = chat("user: hi", f"assistant: {'y' * 120}", "user: a", "assistant: b")
FULL = chat(f"user: {'hi' * 50}", "assistant: yo")


def test_a_window_is_what_the_template_writes_for_the_shortened_messages() -> None:
    """Each body begins with the answer before: the prompt, an answer, what followed."""
    tokenizer = byte_tokenizer(CHATML)
    whole, messages = tokenize(TALK, tokenizer), TALK["messages"]
    found = tokenize(TALK, tokenizer, max_length=72, overflow="windows")
    assert len(whole["input_ids"]) > 72
    assert len(found) == 2
    for window, turns in zip(found, ([0, 1, 2, 3], [0, 3, 4, 5]), strict=True):
        short = tokenize({"messages": [messages[i] for i in turns]}, tokenizer)
        ids = window["input_ids"]
        assert short["input_ids"][: len(ids)] == ids
        assert tokenizer.decode(short["input_ids"][len(ids) :]) == "\n"


@pytest.mark.parametrize("target", ["loss_mask", "labels"])
def test_chats_in_windows(target: str, caplog: Any) -> None:
    tokenizer, options = byte_tokenizer(CHATML), {"max_length": 72, "overflow": "windows"}
    options |= {"labels": target == "labels"}
    records = [{**record, "weight": 2.0} for record in (TALK, FULL, LONG, chat("user: hi"))]
    records.append({**chat("user: hi", "assistant: yo"), "weight": 2.0})
    alone = [tokenize(record, tokenizer, **options) for record in records]
    reasons = [rows[0]["skip_reason"] for rows in alone]
    assert reasons == ["", "prompt_too_long", "", "no_assistant_turn", ""]
    assert [len(rows) for rows in alone] == [2, 1, 3, 1, 1]
    assert set(alone[0][0]) == {
        "input_ids", target, "num_cut_tokens", "skip_reason", "is_continued", "weight"
    }  # fmt: skip
    for record, rows in zip(records, alone, strict=True):
        if not rows[0]["skip_reason"]:
            whole = tokenize(record, tokenizer, labels=target == "labels")
            row = {name: whole[name] for name in ("input_ids", target)}
            assert [{n: w[n] for n in row} | {"is_continued": w["is_continued"]} for w in rows] == (
                windows(row, 72)
            )
    dataset = datasets.Dataset.from_list(records)
    with caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"):
        rows, skips = tokenize_chat_dataset(dataset, tokenizer, ChatOptions(**options))
    assert skips == {"prompt_too_long": 1, "no_assistant_turn": 1}
    names = ["input_ids", target, "is_continued", "record_index", "weight"]
    assert rows.column_names == names
    wanted = [
        {**{name: window.get(name) for name in names}, "record_index": i}
        for i, found in enumerate(alone)
        for window in found
        if not window["skip_reason"]
    ]
    assert list(rows) == wanted
    trained, lost = 0, 0
    for record in (TALK, LONG, records[-1]):
        mask = tokenize(record, tokenizer)["loss_mask"]
        trained, lost = trained + sum(mask), lost + sum(mask[72:])
    [line] = [r.getMessage() for r in caplog.records if "windows" in r.getMessage()]
    share = f"{100 * lost / trained:.1f}%"
    assert (
        line == f"3 rows became 6 windows; truncation would have lost {share} of the trained tokens"
    )
    grouped, of_groups = tokenize_chat_dataset(
        dataset, tokenizer, ChatOptions(group_turns=True, **options)
    )
    assert of_groups == skips
    for row in grouped:
        own = [each for each in rows if each["record_index"] == row["record_index"]]
        assert row["input_ids"] == [each["input_ids"] for each in own]
        assert row[target] == [each[target] for each in own]
        assert row["is_continued"] == any(each["is_continued"] for each in own)
        options_of_one = {**options, "group_turns": True}
        one = tokenize(records[row["record_index"]], tokenizer, **options_of_one)
        assert (one["input_ids"], one["skipped_segments"]) == (row["input_ids"], [])


def test_an_audit_of_records_makes_no_windows() -> None:
    options = ChatOptions(max_length=72, overflow="windows", group_turns=True)
    assert audit([TALK, LONG], byte_tokenizer(CHATML), chat=options).num_rows == 2


# ---- what is refused

TEXT = "text, whose segments can share what they begin with; leave it out"
BAD_OPTIONS: dict[str, tuple[Any, type[Exception], str]] = {
    "each": (
        lambda: ChatOptions(train_on="each", max_length=9, overflow="windows"), ValueError,
        "cuts one example of a conversation into windows of max_length, got ChatOptions.train_on="
        "'each', max_length=9, overflow='windows'.; give max_length, and train_on='all' or 'last'",
    ),
    "no length": (
        lambda: ChatOptions(overflow="windows"), ValueError, "got .*; give max_length, and train_on"
    ),
    "group_turns": (
        lambda: ChatOptions(max_length=9, overflow="drop", group_turns=True), ValueError,
        'group_turns=True puts the examples of a conversation together, and train_on="all" makes',
    ),
    "a processor": (
        lambda: tokenize_chat(
            TALK, SimpleNamespace(image_processor=None, tokenizer=None), ChatOptions(**WINDOWS)
        ), ValueError, f"overflow='windows' is for {TEXT}",
    ),
    "preferences": (
        lambda: tokenize_preferences(
            datasets.Dataset.from_dict({"chosen": ["a"], "rejected": ["b"]}),
            byte_tokenizer(CHATML), ChatOptions(**WINDOWS),
        ), ValueError, "overflow='windows' makes several examples of a side, and a pair has one",
    ),
    "max_length": (lambda: windows(ROW, 1), ValueError, "max_length must be at least 2, got 1"),
    "pinned": (
        lambda: windows(ROW, 9, pinned=-1), ValueError,
        "pinned must be at least 0, got -1; None pins the whole prompt",
    ),
    "overlap": (
        lambda: windows(ROW, 9, overlap=2.0), TypeError,
        "overlap must be an int, got 2.0 of type float; 0 begins with one earlier answer",
    ),
    "as_segments": (
        lambda: windows(ROW, 9, as_segments=1), TypeError,
        "as_segments must be True or False, got 1",
    ),
    "no mapping": (
        lambda: windows([1, 2], 9), TypeError,
        "an example is a mapping with input_ids, got a list",
    ),
}  # fmt: skip
WINDOWS: dict[str, Any] = {"max_length": 9, "overflow": "windows"}
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt that fills the window": (
        {"input_ids": [1] * 12, "loss_mask": [0] * 8 + [1] * 4},
        "^the prompt has 8 tokens, and max_length=9 must hold it and two more; raise max_length, "
        r"pin less of it \(pinned=\), or leave the example out$",
    ),
    "nothing trained": (
        {"input_ids": [1, 2], "loss_mask": [1, 0]}, "none of the example's 2 tokens is trained"
    ),
    "images": ({**ROW, "pixel_values": [[1.0]]}, "the example has pixel_values, and windows are"),
    "segments": ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "input_ids holds 1 lists; give o"),
    "two targets": ({**ROW, "labels": [1] * 12}, "two loss targets: loss_mask and labels"),
    "no mask in this row": ({**ROW, "loss_mask": None}, "example 0: loss_mask is None; give a l"),
    "a short mask": ({**ROW, "loss_mask": [1]}, "loss_mask has 1 entries, input_ids has 12"),
    "packed before": ({**ROW, "position_ids": [0, 1, 2] * 4}, "position_ids is 0 at token 3"),
    "rollouts": ({"prompt_ids": [1], "response_ids": [2]}, "no input_ids in example 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_are_refused(case: str) -> None:
    call, kind, message = BAD_OPTIONS[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_are_refused(case: str) -> None:
    row, message = BAD_ROWS[case]
    with pytest.raises(DataError, match=message):
        windows(row, 9)
    assert windows({**ROW, "pixel_values": None}, 12)[0]["input_ids"] == ROW["input_ids"]
