"""tokenize_chat_dataset: each row is what tokenize_chat returns, whatever Arrow does to records."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset, load_dataset

from tests.chat.chats import (
    NO_TAGS,
    SAID,
    TAGS,
    THINKS,
    TOOL,
    TWO,
    byte_tokenizer,
    chat,
    thinking,
    tokenize,
    with_call,
)
from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from torch_collate_kit.chat import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.errors import DataError
from torch_collate_kit.preference import tokenize_preferences
from torch_collate_kit.reporting import audit

MIXED = [
    SAID,
    chat("user: hi"),
    TWO,
    chat("user: " + "x" * 60, "assistant: yo"),
    chat("user: bye", "assistant: " + "z" * 60),
    chat("user: hi", "assistant: last"),
]


@pytest.fixture(scope="module")
def tagged() -> Any:
    return byte_tokenizer(TAGS)


def tokenize_all(records: Any, tokenizer: Any, **options: Any) -> tuple[Any, Any]:
    dataset = Dataset.from_list(records) if isinstance(records, list) else records
    return tokenize_chat_dataset(dataset, tokenizer, ChatOptions(**options))


@pytest.mark.parametrize("num_proc", [None, 2])
def test_dataset(tagged: Any, num_proc: int | None, caplog: Any, capsys: Any) -> None:
    source = Dataset.from_list([{**row, "id": i} for i, row in enumerate(MIXED)])
    options: Any = {"max_length": 60, "overflow": "truncate"}
    with (
        caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"),
        patch.object(Dataset, "map", autospec=True, side_effect=Dataset.map) as spy,
    ):
        tokenized, skips = tokenize_chat_dataset(
            source, tagged, ChatOptions(**options), num_proc=num_proc
        )
    assert spy.call_args_list[0].kwargs["num_proc"] == num_proc
    assert "Tokenizing chats" in capsys.readouterr().err  # the progress bar
    kept = [tokenize(row, tagged, **options) for row in MIXED]
    kept = [row for row in kept if not row.pop("skip_reason")]
    assert len(kept) == 4
    assert list(tokenized) == kept
    assert skips == Counter(no_assistant_turn=1, nothing_left_after_truncation=1)
    types = {name: str(getattr(f, "feature", f).dtype) for name, f in tokenized.features.items()}
    assert types == {"input_ids": "int32", "loss_mask": "int8", "num_cut_tokens": "int64"}
    assert tokenized._indices is None
    (cut,) = [row["num_cut_tokens"] for row in kept if row["num_cut_tokens"]]
    assert [record.getMessage() for record in caplog.records] == [
        f"cut {cut} tokens off 1 of 6 examples",
        "skipped 2 of 6 examples: {'no_assistant_turn': 1, 'nothing_left_after_truncation': 1}",
    ]
    assert source.column_names == ["messages", "id"]


def test_only_the_first_rank_of_a_launcher_shows_bars(
    tagged: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    labelled = [{"prompt": "a", "completion": "bc"[i], "label": bool(i)} for i in range(2)]
    pairs, chats = Dataset.from_list(labelled), Dataset.from_list(MIXED)
    for rank in ("1", "0"):  # as torchrun and accelerate launch set it
        monkeypatch.setenv("RANK", rank)
        tokenize_chat_dataset(chats, tagged)
        tokenize_preferences(pairs, tagged)
        audit(chats, tagged)
        shown = capsys.readouterr().err
        names = ("Tokenizing chats", "Tokenizing preferences", "Adding answers of other rows")
        assert [name in shown for name in names] == [rank == "0"] * 3
        assert rank == "0" or "%|" not in shown


def test_long_examples_are_dropped_by_default(tagged: Any, caplog: Any) -> None:
    for options in ({}, {"overflow": "drop"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"):
            found, skips = tokenize_all([SAID, MIXED[4]] * 2, tagged, max_length=60, **options)
        assert found.column_names == ["input_ids", "loss_mask"]
        assert skips == Counter(too_long=2)
        messages = [record.getMessage() for record in caplog.records]
        assert messages == ["skipped 2 of 4 examples: {'too_long': 2}"]
    with pytest.raises(DataError, match=r"example 1: the text has \d+ tokens, more"):
        tokenize_all([SAID, MIXED[4]], tagged, max_length=60, overflow="raise")
    whole, _ = tokenize_all([SAID], tagged, overflow="truncate")
    assert list(whole["num_cut_tokens"]) == [0]


def test_every_option_is_passed_on(tagged: Any) -> None:
    options: dict[str, Any] = {
        "train_on": "last",
        "max_length": 180,
        "overflow": "truncate",
        "tools": [TOOL],
        "chat_template_kwargs": {"mark": "!"},
        "labels": True,
    }
    row = {"messages": TWO["messages"] + with_call()["messages"]}
    expected = tokenize(row, tagged, **options)
    assert expected["num_cut_tokens"] > 0
    tokenized, _ = tokenize_all([row], tagged, **options)
    assert tokenized[0] == {
        name: found for name, found in expected.items() if name != "skip_reason"
    }
    assert tokenized.features["labels"].feature.dtype == "int32"
    for name in options:
        others = {k: v for k, v in options.items() if k != name}
        assert tokenize(row, tagged, **{"overflow": "drop", **others}) != expected, name


@pytest.mark.parametrize("template", [TAGS, NO_TAGS], ids=["tags", "prefixes"])
def test_arrow_fills_in_what_is_missing(template: str) -> None:
    """Rows of one table share their keys; each must come out as if it were alone."""
    rows = [
        {**with_call(), "tools": [TOOL], "system": None, "instruction": None, "output": None},
        {**SAID, "tools": None, "system": "be kind"},
        {"messages": None, "instruction": "hi", "output": "yo"},
    ]
    mappings = [with_call(arguments={"q": "1"}), with_call(arguments={"a": "x", "b": [{"c": 1}]})]
    tokenizer = byte_tokenizer(template)
    for group in (rows, mappings):
        tokenized, skips = tokenize_all(group, tokenizer)
        assert not skips
        expected = [tokenize(row, tokenizer)["input_ids"] for row in group]
        assert list(tokenized["input_ids"]) == expected


ARROW = [
    name
    for name in CONVERSATIONS
    if name not in ("call, None inside a dict", "documents", "thinking off", "thinking on")
    and not name.startswith(("parts of", "two parts"))  # Arrow has strings or lists, not both
]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "nemotron_3_nano", "gemma4_v5", "lfm2_v2"])
def test_records_that_went_through_arrow(name: str) -> None:
    """Arrow gives every message every key, with None where it had none."""
    tokenizer = tokenizer_for(templates()[name], FAMILY_OF[name].eos)
    for conversation in ARROW[:: 1 if "ALL_CASES" in os.environ else 3]:
        try:
            expected = tokenize(CONVERSATIONS[conversation], tokenizer, train_on="each")
        except DataError:
            continue
        records = [CONVERSATIONS[conversation]] * 2
        rows, _skipped = tokenize_all(records, tokenizer, train_on="each")
        got = [(row["input_ids"], row["loss_mask"]) for row in rows]
        wanted = [(e["input_ids"], e["loss_mask"]) for e in expected if not e["skip_reason"]]
        assert got == wanted * 2, conversation
        assert list(rows["record_index"]) == [0] * len(wanted) + [1] * len(wanted)


def test_each_drops_the_turns_that_are_too_long() -> None:
    tokenizer = byte_tokenizer(THINKS)
    record = thinking("A", "B" * 50)
    first, last = tokenize(record, tokenizer, train_on="each")
    options: Any = {"train_on": "each", "max_length": len(last["input_ids"]) - 1}
    kept, dropped = tokenize(record, tokenizer, overflow="drop", **options)
    assert (kept, dropped["skip_reason"]) == (first, "too_long")
    rows, skips = tokenize_all([record], tokenizer, **options)
    assert (list(rows["input_ids"]), list(rows["record_index"])) == ([first["input_ids"]], [0])
    assert skips == {"too_long": 1}
    with pytest.raises(DataError, match="tokens, more than max_length"):
        tokenize(record, tokenizer, **options)
    for overflow, reason in (("truncate", "nothing_left_after_truncation"), ("drop", "too_long")):
        [row] = tokenize(record, tokenizer, train_on="each", max_length=5, overflow=overflow)
        assert row["skip_reason"] == reason


# ---- group_turns: the examples of a conversation as the segments of one


def test_segments_are_the_examples_of_each() -> None:
    tokenizer = byte_tokenizer(THINKS)
    records = [chat("user: hi"), thinking("A", "B", "C"), thinking("D")]
    records = [{**record, "weight": 0.5} for record in records]
    for options in ({}, {"labels": True}, {"max_length": 115}):  # which drops turns
        target = "labels" if "labels" in options else "loss_mask"
        alone, counts = tokenize_all(records, tokenizer, train_on="each", **options)
        rows, skips = tokenize_all(records, tokenizer, train_on="each", group_turns=True, **options)
        assert skips == counts
        assert rows.column_names == alone.column_names
        assert list(rows["record_index"]) == sorted(set(alone["record_index"]))
        for row in rows:
            of_record = [each for each in alone if each["record_index"] == row["record_index"]]
            assert [row["weight"]] * len(of_record) == [each["weight"] for each in of_record]
            for name in ("input_ids", target):
                assert row[name] == [each[name] for each in of_record]
            options_of_one = {"overflow": "drop", **options}
            record = records[row["record_index"]]
            one = tokenize(record, tokenizer, train_on="each", group_turns=True, **options_of_one)
            assert (one["input_ids"], one[target]) == (row["input_ids"], row[target])
            every = tokenize(record, tokenizer, train_on="each", **options_of_one)
            skipped = [each["skip_reason"] for each in every if each["skip_reason"]]
            assert (one["skip_reason"], one["skipped_segments"]) == ("", skipped)


def test_segments_that_are_left_out_are_counted(caplog: Any) -> None:
    tokenizer = byte_tokenizer(THINKS)
    records = [thinking("A", "B" * 9, "C" * 50), thinking("D" * 199)]
    options: Any = {"train_on": "each", "max_length": 150}
    lengths = [len(e["input_ids"]) for e in tokenize(records[0], tokenizer, train_on="each")]
    assert lengths[1] < 150 < lengths[2]
    with caplog.at_level(logging.WARNING, logger="torch_collate_kit.chat"):
        rows, skips = tokenize_all(records, tokenizer, group_turns=True, **options)
        cut, _ = tokenize_all(records, tokenizer, group_turns=True, overflow="truncate", **options)
    assert skips == {"too_long": 2}
    assert [list(map(len, row["input_ids"])) for row in rows] == [lengths[:2]]
    assert next(iter(cut["num_cut_tokens"])) == lengths[2] - 150
    assert list(map(len, next(iter(cut))["input_ids"])) == [*lengths[:2], 150]
    assert [record.getMessage() for record in caplog.records][:1] == [
        "skipped 2 segments of 2 conversations: {'too_long': 2}"
    ]
    last = tokenize(records[1], tokenizer, group_turns=True, overflow="drop", **options)
    assert (last["input_ids"], last["skip_reason"]) == ([], "too_long")


def test_group_turns_is_refused_where_it_has_no_meaning() -> None:
    for train_on in ("all", "last"):
        with pytest.raises(ValueError, match=f'train_on="{train_on}" makes one; pass train_on="ea'):
            ChatOptions(train_on=train_on, group_turns=True)
    with pytest.raises(TypeError, match="group_turns must be True or False, got 1"):
        ChatOptions(train_on="each", group_turns=1)
    processor: Any = SimpleNamespace(image_processor=None, tokenizer=byte_tokenizer(THINKS))
    with pytest.raises(ValueError, match="group_turns=True is for text, whose segments"):
        tokenize_chat(SAID, processor, ChatOptions(train_on="each", group_turns=True))


@pytest.mark.parametrize("num_proc", [None, 2])
def test_errors_name_the_example(tagged: Any, num_proc: int | None) -> None:
    with pytest.raises(TypeError, match="num_proc must be an int, got '2' of type str; None is"):
        tokenize_chat_dataset(Dataset.from_list([{}]), tagged, num_proc="2")
    rows = [*MIXED, {"messages": [{"role": None, "content": "x"}]}]
    with pytest.raises(DataError, match=r"example 6: messages\[0\] must be a dict with a `role`"):
        tokenize_chat_dataset(Dataset.from_list(rows), tagged, num_proc=num_proc)


def test_nothing_kept(tagged: Any) -> None:
    rows = [chat("user: hi"), chat("user: hi"), MIXED[3]]
    counts = "2 with no_assistant_turn, 1 with too_long"
    message = f"^all 3 examples are skipped: {counts}; a record needs an assistant"
    with pytest.raises(DataError, match=message):
        tokenize_all(rows, tagged, max_length=60)


@pytest.mark.parametrize(("target", "dtype"), [("loss_mask", "int8"), ("labels", "int32")])
def test_empty_dataset(tagged: Any, target: str, dtype: str) -> None:
    empty = Dataset.from_list(MIXED).select([])
    tokenized, skips = tokenize_all(empty, tagged, labels=target == "labels")
    assert (len(tokenized), skips) == (0, Counter())
    assert tokenized.column_names == ["input_ids", target]
    assert tokenized.features[target].feature.dtype == dtype


def test_dataset_with_a_format(tagged: Any) -> None:
    source = Dataset.from_list(MIXED[:1])
    plain, _ = tokenize_all(source, tagged)
    formatted, _ = tokenize_all(source.with_format("numpy"), tagged)
    assert formatted[0] == plain[0]


def test_second_run_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A used tokenizer and a fresh one have the same fingerprint; another option has not."""
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    path.write_text("\n".join(json.dumps(row) for row in MIXED))
    used = byte_tokenizer(TAGS)

    def run(tokenizer: Any, **options: Any) -> list[list[int]]:
        source = load_dataset("json", data_files=str(path), cache_dir=str(cache), split="train")
        return list(tokenize_all(source, tokenizer, **options)[0]["loss_mask"])

    first = run(used)
    monkeypatch.delattr("torch_collate_kit.chat.dataset.tokenize_records")  # whoever maps now fails
    assert run(used) == run(byte_tokenizer(TAGS)) == first
    with pytest.raises(NameError, match="tokenize_records"):
        run(used, train_on="last")


def test_a_stream_is_mapped_as_the_error_says(tagged: Any) -> None:
    stream = Dataset.from_list(MIXED).to_iterable_dataset()
    with pytest.raises(TypeError, match=r"got IterableDataset; .*stream\.map\(tokenize_chat"):
        tokenize_all(stream, tagged)
    stream = stream.map(tokenize_chat, fn_kwargs={"tokenizer": tagged}, remove_columns=["messages"])
    rows = list(stream.filter(lambda row: not row["skip_reason"]))
    assert len(rows) == 5
    assert rows[0] == tokenize_chat(MIXED[0], tagged)
