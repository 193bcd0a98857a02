"""Raw texts become documents with the ids of a loop; traces become conversations."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from tests.chat.chats import slow_tokenizer
from tests.chat.families import byte_of
from tests.command import byte_tokenizer, run_command
from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    ParallelLayout,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.chat import (
    tokenize_chat,
    tokenize_chat_dataset,
    tokenize_documents,
    trace_paths,
)
from torch_collate_kit.chat.cache_keys import cache_key
from torch_collate_kit.errors import DataError
from torch_collate_kit.preference import tokenize_preferences
from torch_collate_kit.testing import assert_exact_resume

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TEXTS = ["ab", "", "a</s>b", "<s>a", "<s>a</s>", " ", "x\ny", "\u00e9\u4e16"]


def tokenizer_with(around: str, **tokens: str) -> Any:
    """A byte tokenizer that adds tokens around a text: "<s> $A </s>"."""
    tokenizer = byte_tokenizer("<s></s>")
    tokenizer.bos_token, tokenizer.eos_token = tokens.get("bos", "<s>"), "</s>"
    names = [name for name in around.split() if name != "$A"]
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=around, special_tokens=ids
    )
    return tokenizer


def by_a_loop(texts: list[str], tokenizer: Any, before: str, after: str) -> list[list[int]]:
    """Return the documents, text by text and byte by byte."""
    documents = []
    for text in texts:
        if not text:
            continue
        ids = [tokenizer.convert_tokens_to_ids(token) for token in before.split()]
        ids += [BYTES[byte] for byte in text.encode()]
        documents.append(ids + [tokenizer.convert_tokens_to_ids(t) for t in after.split()])
    return documents


BYTES = {byte: byte_tokenizer("").get_vocab()[c] for c, byte in byte_of().items()}


@pytest.mark.parametrize(
    ("around", "before", "after"),
    [("$A", "", "</s>"), ("<s> $A", "<s>", "</s>"), ("<s> $A </s>", "<s>", "</s>")],
)
def test_documents_are_those_of_a_loop(around, before, after):
    tokenizer = tokenizer_with(around)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    given = datasets.Dataset.from_dict({"text": TEXTS, "url": ["u"] * len(TEXTS)})
    found, skipped = tokenize_documents(given, tokenizer)
    assert found["input_ids"][:] == by_a_loop(TEXTS, tokenizer, before, after)
    assert (skipped, found.column_names) == (Counter(empty=1), ["input_ids"])
    assert found.features["input_ids"].feature.dtype == "int32"
    without, _ = tokenize_documents(given, tokenizer, end=False)
    end = after if "</s>" in around else ""
    assert without["input_ids"][:] == by_a_loop(TEXTS, tokenizer, before, end)
    assert tokenizer("</s>")["input_ids"].count(tokenizer.eos_token_id) >= 1
    assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert TokenizedDataset(found).num_loss_tokens.min() > 0


def test_rendered_texts_keep_their_special_tokens_and_get_none_twice():
    tokenizer = tokenizer_with("<s> $A </s>")
    given = datasets.Dataset.from_dict({"text": ["<s>ab</s>", "<s>ab", "ab</s>", "a</s>b"]})
    found, _ = tokenize_documents(given, tokenizer, parse_special=True)
    ab = "<s>ab</s>"
    texts = [tokenizer.decode(ids) for ids in found["input_ids"]]
    assert texts == [ab, ab, ab, "<s>a</s>b</s>"]
    one_end = tokenizer.convert_tokens_to_ids("</s>")
    assert [ids.count(one_end) for ids in found["input_ids"]] == [1, 1, 1, 2]


def test_bos_that_is_eos_is_not_taken_for_a_begin():
    tokenizer = tokenizer_with("$A", bos="</s>")
    found, _ = tokenize_documents(datasets.Dataset.from_dict({"text": ["ab"]}), tokenizer)
    assert found["input_ids"][:] == by_a_loop(["ab"], tokenizer, "", "</s>")


def test_other_tokenizers_and_many_processes_make_the_same():
    texts = [f"text {i} of </s>" for i in range(40)]
    given = datasets.Dataset.from_dict({"body": texts})
    tokenizer = tokenizer_with("<s> $A")
    one, _ = tokenize_documents(given, tokenizer, text="body")
    two, _ = tokenize_documents(given, tokenizer, text="body", num_proc=2)
    assert one["input_ids"][:] == two["input_ids"][:] == by_a_loop(texts, tokenizer, "<s>", "</s>")
    slow = slow_tokenizer(TEMPLATE)
    found, _ = tokenize_documents(given.select([0]), slow, text="body")
    alone = slow(texts[0], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert found["input_ids"][0][-1] == slow.eos_token_id
    assert alone == found["input_ids"][0][-len(alone) - 1 : -1]


def test_refusals():
    texts, tokenizer = (
        datasets.Dataset.from_dict({"text": ["a", None], "number": [1, 2]}),
        tokenizer_with("$A"),
    )
    no_end, blank = tokenizer_with("$A"), datasets.Dataset.from_dict({"text": [""]})
    no_end.eos_token = None
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (texts, tokenizer, {}, DataError, "row 1: the text is null; drop the row"),
        (texts, tokenizer, {"text": "number"}, DataError, r"column number holds .* not texts"),
        (
            texts,
            tokenizer,
            {"text": "x"},
            DataError,
            r"no column 'x'; .* one of \['text', 'number'\]",
        ),
        (blank, tokenizer, {}, DataError, "all 1 texts of column text are empty"),
        (["a"], tokenizer, {}, TypeError, r"expected a datasets\.Dataset"),
        (blank.select([]), tokenizer, {}, DataError, r"the dataset is empty \(0 texts\)"),
        (blank.with_transform(dict), tokenizer, {}, TypeError, r"on the fly \(set_transform\)"),
        (texts, 3, {}, TypeError, "expected a tokenizer, got int"),
        (texts, tokenizer, {"end": 1}, TypeError, "end must be True or False"),
        (texts, no_end, {}, ValueError, r"the tokenizer has no EOS; .* end=False"),
    ]
    for given, loaded, options, error, message in cases:
        with pytest.raises(error, match=message):
            tokenize_documents(given, loaded, **options)
    with pytest.raises(DataError, match=r"raw texts are for chat\.tokenize_documents"):
        tokenize_chat_dataset(texts.remove_columns("number").select([0]), byte_tokenizer(TEMPLATE))


def key_of(tokenizer: Any, **options: Any) -> str:
    if isinstance(tokenizer, str | Path):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return cache_key("texts", tokenizer, options)


def test_keys_are_of_contents(tmp_path):
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    key, used = key_of(tmp_path / "a"), key_of(tokenizer)
    assert key == key_of(tmp_path / "b")
    tokenizer(["a", "bcd"], truncation=True, max_length=2)
    tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert used == key_of(tokenizer)
    others = {key, key_of(tmp_path / "a", end=False)}
    tokenizer.chat_template = TEMPLATE + " "
    others.add(key_of(tokenizer))
    tokenizer.add_tokens(["<new>"])
    others.add(key_of(tokenizer))
    assert len(others) == 4
    texts = datasets.Dataset.from_dict({"text": ["ab", "c"]})
    prints = [tokenize_documents(texts, tokenizer, end=of)[0]._fingerprint for of in (True, False)]
    assert prints[0] != prints[1]


def test_keys_are_the_same_in_another_process(tmp_path):
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    code = "import sys; from tests.chat.test_documents import key_of; print(key_of(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == key_of(tmp_path)


CHATS = [
    {"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": c}]}
    for c in "abcd"
]
PAIRS = [{"prompt": c, "chosen": c + "!", "rejected": c + "?"} for c in "abcd"]
RAW = [{"text": c} for c in "abcd"]


@pytest.mark.parametrize(
    ("rows", "tokenize"),
    [(CHATS, tokenize_chat_dataset), (PAIRS, tokenize_preferences), (RAW, tokenize_documents)],
)
def test_two_splits_of_one_file_keep_their_own_rows(rows, tokenize, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = datasets.load_dataset(
        "json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
    )
    tokenizer = byte_tokenizer(TEMPLATE)
    first, second = (tokenize(whole.select(part), tokenizer)[0] for part in ([0, 1], [2, 3]))
    both = [row["input_ids"] for of in (first, second) for row in of]
    assert both == [
        row["input_ids"] for row in tokenize(datasets.Dataset.from_list(rows), tokenizer)[0]
    ]
    assert first.cache_files or second.cache_files


@pytest.fixture
def saved(tmp_path) -> Path:
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "kind"), [(CHATS, "chats"), (PAIRS, "preferences"), (RAW, "texts")]
)
def test_the_command_writes_a_folder_that_is_opened(rows, kind, saved, capsys):
    data, out = write(saved / "rows.jsonl", rows), saved / "out"
    arguments = ["tokenize", data, "--tokenizer", saved / "tokenizer", "--out", out]
    assert run_command(*arguments) == 0
    assert f"4 examples of {kind}" in capsys.readouterr().out
    note = json.loads((out / "tokenize.json").read_text())
    assert (note["kind"], note["examples"], note["skipped"]) == (kind, 4, {})
    assert len(TokenizedDataset(out)) == len(TokenizedDataset(str(out))) == 4
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    write(saved / "rows.jsonl", rows)  # touched
    assert run_command(*arguments) == 0
    assert "is up to date" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    write(data, rows[:3])
    assert run_command(*arguments) == 0
    assert "3 examples" in capsys.readouterr().out
    tokenizer = byte_tokenizer(TEMPLATE + "{# #}")
    tokenizer.save_pretrained(saved / "tokenizer")
    assert run_command(*arguments) == 0
    assert "3 examples" in capsys.readouterr().out
    assert run_command("report", out) == 0


def test_the_command_forces_texts_and_refuses_what_is_tokenized(saved, capsys):
    both = [{"text": c, **chat} for c, chat in zip("abcd", CHATS, strict=True)]
    data, out = write(saved / "rows.jsonl", both), saved / "out"
    common = ["--tokenizer", saved / "tokenizer", "--out", out]
    assert run_command("tokenize", data, *common, "--text", "text") == 0
    assert TokenizedDataset(out).lengths.tolist() == [2, 2, 2, 2]
    for name, rows in (
        ("tokens", [{"input_ids": [5, 6]}]),
        ("rollouts", [{"prompt_ids": [5], "response_ids": [6], "rewards": 1.0, "loss_mask": [1]}]),
        ("the columns ['x']", [{"x": 1}]),
    ):
        assert run_command("tokenize", write(saved / "other.jsonl", rows), *common) == 2
        assert f"holds {name}; tokenize takes pairs, chats and texts" in capsys.readouterr().err
    (saved / "one.txt").write_text("a\n\nb")
    assert run_command("tokenize", saved / "one.txt", *common) == 0
    assert TokenizedDataset(out).lengths.tolist() == [5]
    (saved / "full").mkdir()
    (saved / "full" / "own.txt").write_text("mine")
    assert run_command("tokenize", data, *common[:3], saved / "full") == 2
    assert "tokenize did not write it" in capsys.readouterr().err
    assert (saved / "full" / "own.txt").read_text() == "mine"
    assert run_command("tokenize", data, *common, "--split", "tset") == 2
    assert "there is no split 'tset'; it has train" in capsys.readouterr().err
    (out / "tokenize.json").write_text("[1]")
    assert run_command("tokenize", data, *common) == 2
    assert "tokenize.json: is not what tokenize wrote; remove" in capsys.readouterr().err


def test_the_command_writes_through_a_link_and_removes_nothing_else(saved):
    data = write(saved / "rows.jsonl", CHATS)
    for name in ("disk", "link.half"):
        (saved / name).mkdir()
    (saved / "link.half" / "own.txt").write_text("mine")
    (saved / "link").symlink_to(saved / "disk")
    for _ in range(2):
        arguments = ["--tokenizer", saved / "tokenizer", "--out", saved / "link"]
        assert run_command("tokenize", data, *arguments) == 0
    assert (saved / "link").is_symlink()
    assert len(TokenizedDataset(saved / "disk")) == 4
    assert (saved / "link.half" / "own.txt").read_text() == "mine"
    names = {path.name for path in saved.iterdir()}
    assert names == {"rows.jsonl", "disk", "link.half", "link", "tokenizer"}


def test_a_run_from_raw_text_goes_on_with_other_ranks():
    texts = datasets.Dataset.from_dict({"text": ["x" * (1 + i % 20) for i in range(60)]})
    tokens = TokenizedDataset(tokenize_documents(texts, tokenizer_with("$A"))[0])

    def make(dp_rank: int = 0, dp_size: int = 1) -> Any:
        collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp_size))
        sampler = PackedBatchSampler(tokens, collate, batch_size=16, dp_rank=dp_rank, shuffle=True)
        return PrefetchLoader(DataLoader(tokens, batch_sampler=sampler, collate_fn=collate))

    assert_exact_resume(make, num_steps=6, dp_sizes=[2, 1])


IDS = {"parentUuid": "uuid", "parentId": "id"}


def event(
    number: int, parent: int | None, role: str, text: Any, key: str = "parentUuid", **others: Any
) -> dict[str, Any]:
    of = {IDS[key]: str(number), key: None if parent is None else str(parent)}
    return of | {"message": {"role": role, "content": text}} | others


@pytest.mark.parametrize("key", IDS)
def test_branches_side_chains_and_headers(key):
    events = [
        {"type": "session", "version": 3},
        event(1, None, "user", "q", key),
        event(2, 1, "assistant", "a", key),
        event(8, None, "user", "sub", key, isSidechain=True),
        event(9, 8, "assistant", "SUBAGENT", key, isSidechain=True),
        event(3, 2, "user", "r", key),
        event(4, 3, "assistant", "b", key),
        event(5, 2, "user", "s", key),
        event(6, 5, "assistant", "c", key),
        event(7, 6, "assistant", "529", key, isApiErrorMessage=True),
    ]
    given = copy.deepcopy(events)
    paths = trace_paths(events)
    assert events == given
    assert all(path[0] is events[0] for path in paths)
    texts = [[of["message"]["content"] for of in path if "message" in of] for path in paths]
    assert texts == [["q", "a", "r", "b"], ["q", "a", "s", "c", "529"]]
    trained = [
        [
            of["message"]["content"]
            for of in path
            if "message" in of
            and of["message"]["role"] == "assistant"
            and "train" not in of["message"]
        ]
        for path in paths
    ]
    assert trained == [["a", "b"], ["c"]]
    messages = [of["message"] for of in paths[1] if "message" in of][:4]
    found = tokenize_chat({"messages": messages}, byte_tokenizer(TEMPLATE))
    tokenizer = byte_tokenizer(TEMPLATE)
    kept = [i for i, t in zip(found["input_ids"], found["loss_mask"], strict=True) if t]
    assert tokenizer.decode(kept) == "c<end>"


def test_silent_events_between_the_calls_of_an_answer_are_walked_over():
    calls = [[{"type": "tool_use", "id": i}] for i in "12"]
    results = [[{"type": "tool_result", "tool_use_id": i, "content": "r"}] for i in "12"]
    events = [
        event("u", None, "user", "q"),
        event("a1", "u", "assistant", calls[0]),
        {"uuid": "p", "parentUuid": "a1", "type": "progress"},
        event("a2", "p", "assistant", calls[1]),
        event("r1", "a1", "user", results[0]),
        event("r2", "a2", "user", results[1]),
        event("b", "r2", "assistant", "done"),
    ]
    assert trace_paths(iter(events)) == [events]
    with pytest.raises(TypeError, match="events is a NoneType; pass the lines of a trace, "):
        trace_paths(None)


def test_traces_without_a_tree_are_one_path():
    events = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert trace_paths(events) == [events]
    flat = [json.loads(json.dumps(of)) for of in events]
    assert (
        trace_paths([*flat, {"role": "assistant", "content": "e", "isApiErrorMessage": True}])[0][
            2
        ]["train"]
        is False
    )


def test_refused_traces():
    with pytest.raises(DataError, match="event 0 is 'x'"):
        trace_paths(["x"])
    with pytest.raises(DataError, match="event 0 has the parent '5', which is missing"):
        trace_paths([event(1, 5, "user", "q")])
    with pytest.raises(DataError, match="event 1 has uuid '1'; each needs its own"):
        trace_paths([event(1, None, "user", "q"), event(1, None, "user", "q")])
    circle = [event(1, 2, "user", "q"), event(2, 1, "user", "q")]
    for events, first in (
        (circle, 0),
        ([*circle, event(3, 2, "user", "q")], 0),
        ([event(3, None, "user", "q"), *circle], 1),
    ):
        with pytest.raises(DataError, match=f"event {first} is its own ancestor"):
            trace_paths(events)
    for of in ({"uuid": ["a"], "parentUuid": None}, {"uuid": "a", "parentUuid": ["b"]}):
        with pytest.raises(DataError, match="event 0 has"):
            trace_paths([of])


def call(number: int, parent: int, *names: str) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in names]
    return event(number, parent, "assistant", calls)


def result(number: int, parent: int, *names: str) -> dict[str, Any]:
    found = [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in names]
    return event(number, parent, "user", found)


@pytest.mark.parametrize("last", [5, 6])
def test_results_of_parallel_calls_are_in_one_path(last):
    asked = event(1, None, "user", "q")
    calls, results = [call(2, 1, "a"), call(3, 2, "b")], [result(5, 2, "a"), result(6, 3, "b")]
    events = [asked, *calls, *results, event(7, last, "assistant", "done")]
    assert trace_paths(events) == [events]
    assert trace_paths(events[:4]) == [events[:4]], "the run ended before the second result"
    events = [asked, call(2, 1, "a", "b"), result(5, 2, "a"), result(6, 2, "b")]
    assert trace_paths(events) == [events]
    assert trace_paths([*events, result(7, 2, "a")])[0] == events[:3], "done anew: branches"
