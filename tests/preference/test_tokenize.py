"""tokenize_preferences: the sides of a pair are what tokenize_chat makes of each alone."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat.chats import TAGS, TOOL, USER, YO, byte_tokenizer, with_call
from tests.chat.families import templates, tokenizer_for
from torch_collate_kit import (
    ChatOptions,
    DataError,
    PackedBatchSampler,
    PackedCollator,
    PerExample,
    TokenizedDataset,
    tokenize_chat,
)
from torch_collate_kit.preference import tokenize_preferences

PAIR = ("prompt", "chosen", "rejected")
COLUMNS = ("input_ids", "loss_mask")
Record = dict[str, Any]
NO = {**YO, "content": "nope"}
BE = {"role": "system", "content": "be kind"}
CALLS = with_call()["messages"][1:]


def both(records: list[Record], tokenizer: Any, keep: Any = None, **options: Any) -> Any:
    """Return the examples as a list, and the counted reasons."""
    chat = ChatOptions(**options)
    found, skips = tokenize_preferences(Dataset.from_list(records), tokenizer, chat, keep=keep)
    return list(found), skips


def side(prompt: Any, answer: Any, tokenizer: Any, **columns: Any) -> tuple[list[int], list[int]]:
    """Return what tokenize_chat makes of a prompt and an answer."""
    example = tokenize_chat({"prompt": prompt, "completion": answer, **columns}, tokenizer)
    assert not example["skip_reason"]
    return example["input_ids"], example["loss_mask"]


@pytest.fixture(scope="module")
def tagged() -> Any:
    return byte_tokenizer(TAGS)


# ---- the forms of records


FORMS: dict[str, tuple[Record, Any, Any, Any]] = {  # record, its prompt, chosen and rejected
    "explicit": ({"prompt": [USER], "chosen": [YO], "rejected": [NO]}, [USER], [YO], [NO]),
    "implicit": ({"chosen": [USER, YO], "rejected": [USER, NO]}, [USER], [YO], [NO]),
    "implicit, several turns": (
        {"chosen": [BE, USER, YO, USER, YO], "rejected": [BE, USER, YO, USER, NO, USER, YO]},
        *([BE, USER, YO, USER], [YO], [NO, USER, YO]),
    ),
    "one begins with the other": (
        {"chosen": [USER, YO], "rejected": [USER, YO, USER, NO]},
        *([USER], [YO], [YO, USER, NO]),
    ),
    "equal sides": ({"chosen": [USER, YO], "rejected": [USER, YO]}, [USER], [YO], [YO]),
    "a string beside whole chats": (
        {"prompt": "hi", "chosen": [BE, USER, YO], "rejected": [BE, USER, NO], "messages": [USER]},
        *([BE, USER], [YO], [NO]),
    ),
    "a string beside answers": (
        {"prompt": "hi", "chosen": [YO], "rejected": [NO], "system": "be kind"},
        *([BE, USER], [YO], [NO]),
    ),
    "messages in each side again": (
        {"prompt": [USER], "chosen": [USER, YO], "rejected": [USER, NO]},
        *([USER], [YO], [NO]),
    ),
    "keys of other messages": (
        {"chosen": [USER, YO, USER, YO], "rejected": [USER, YO, USER, {**NO, "name": None}]},
        *([USER, YO, USER], [YO], [NO]),
    ),
    "strings": ({"prompt": "1+1=", "chosen": "2.", "rejected": "11"}, "1+1=", "2.", "11"),
    "implicit strings": ({"chosen": "Q: A: be", "rejected": "Q: A: bad"}, "Q: A: b", "e", "ad"),
    "the space before a word is its own": (
        {"chosen": "Q: a A: yes", "rejected": "Q: a A: no"},
        *("Q: a A:", " yes", " no"),
    ),
    "a string that begins the other": ({"chosen": "abc", "rejected": "abcd"}, "ab", "c", "cd"),
}  # fmt: skip


PAIR_COLUMNS = ["input_ids", "loss_mask"]


@pytest.mark.parametrize("form", FORMS)
def test_sides_are_those_of_tokenize_chat(form: str, tagged: Any) -> None:
    record, prompt, chosen, rejected = FORMS[form]
    [example], skips = both([record], tagged)
    expected = [side(prompt, answer, tagged) for answer in (chosen, rejected)]
    assert example == {
        "input_ids": [ids for ids, _ in expected],
        "loss_mask": [mask for _, mask in expected],
    }
    assert not skips
    labels = both([record], tagged, labels=True)[0][0]["labels"]
    for target, (ids, mask) in zip(labels, expected, strict=True):
        assert target == [i if m else -100 for i, m in zip(ids, mask, strict=True)]


def test_values_and_columns_of_the_template(tagged: Any) -> None:
    numbers = {"margin": 0.5, "score_chosen": 3, "score_rejected": -1.25, "weight": 2.0}
    columns = {"tools": [TOOL], "chat_template_kwargs": {"mark": "!"}}
    pair = {"prompt": [USER], "chosen": CALLS, "rejected": [YO]}
    dataset = Dataset.from_list([{**pair, **numbers, **columns, "id": 7}] * 2)
    found, _ = tokenize_preferences(dataset, tagged)
    assert found[1] == {
        "input_ids": [side([USER], answer, tagged, **columns)[0] for answer in (CALLS, [YO])],
        "loss_mask": [side([USER], answer, tagged, **columns)[1] for answer in (CALLS, [YO])],
        **numbers,
    }
    types = {name: str(feature) for name, feature in found.features.items()}
    assert types["loss_mask"] == "List(List(Value('int8')))"
    assert {types[name] for name in numbers} == {"Value('float32')"}
    assert dataset.column_names == [*pair, *numbers, *columns, "id"]
    labelled = {"prompt": "a", "completion": "b", "weight": 0.5, "margin": 1.0}
    rows = [{**labelled, "label": label} for label in (1, 0)]
    found, _ = tokenize_preferences(Dataset.from_list(rows), tagged)
    assert found.column_names == [*PAIR_COLUMNS, "label", "weight"]
    assert list(found["label"]) == [True, False]
    assert str(found.features["label"]) == "Value('bool')"


def test_last_trains_the_last_turn_of_each_answer(tagged: Any) -> None:
    prompt = [USER, YO, USER]
    record = {"prompt": prompt, "chosen": [YO, USER, YO], "rejected": [YO, USER, NO]}
    [example], _ = both([record], tagged, train_on="last")
    for answer, mask in zip((YO, NO), example["loss_mask"], strict=True):
        assert mask == side([*prompt, YO, USER], [answer], tagged)[1]


def test_no_rows(tagged: Any) -> None:
    for columns in (("chosen", "rejected"), ("prompt", "completion", "label")):
        found, skips = tokenize_preferences(Dataset.from_dict({n: [] for n in columns}), tagged)
        labels = ["label"] if "label" in columns else []
        assert (found.column_names, len(found)) == ([*PAIR_COLUMNS, *labels], 0)
        assert not skips


def test_rows_without_a_target_are_counted(tagged: Any, caplog: Any) -> None:
    pair = {"prompt": [USER], "chosen": [YO], "rejected": [NO], "id": 0}
    rows = [
        pair,
        {**pair, "chosen": [USER]},
        {**pair, "rejected": [{**NO, "weight": 0}]},
        {**pair, "rejected": [USER, USER]},
        pair,
    ]
    found, skips = both(rows, tagged)
    assert found == both([pair] * 2, tagged)[0]
    reasons = (
        "chosen_no_assistant_turn",
        "rejected_no_trained_tokens",
        "rejected_no_assistant_turn",
    )
    assert skips == Counter(reasons)
    assert [r.getMessage()[:24] for r in caplog.records] == ["skipped 3 of 5 examples:"]


# ---- length


Cells = list[tuple[str, bool]]


def cut_slowly(cells: list[Cells], limit: int, keep: str | None) -> list[Cells] | None:
    """Return what is kept of each side, token by token; None if the pair is dropped."""
    if keep == "prompt_end":
        while any(len(side) > limit for side in cells):
            if any([is_answer for _, is_answer in side].count(False) < 2 for side in cells):
                return None
            cells = [side[1:] for side in cells]
    elif keep == "answer_start":
        cells = [[cell for i, cell in enumerate(side) if i < limit] for side in cells]
    elif any(len(side) > limit for side in cells):
        return None
    return cells if all(any(is_answer for _, is_answer in side) for side in cells) else None


@pytest.mark.parametrize("keep", [None, "prompt_end", "answer_start"])
@pytest.mark.parametrize("limit", [7, 10, 15])
def test_long_pairs_against_a_slow_cut(limit: int, keep: Any, tagged: Any) -> None:
    random = np.random.default_rng(limit)
    words = ["abcdefghijklm"[-n:] for n in random.integers(1, 12, 600)]
    pairs = [dict(zip(PAIR, words[i::200], strict=True)) for i in range(200)]
    expected = []
    for prompt, *answers in (pair.values() for pair in pairs):
        asked = [("<s>", False), *((c, False) for c in prompt)]
        sides = [[*asked, *((c, True) for c in a)] for a in answers]
        kept = cut_slowly(sides, limit, keep)
        if kept:
            expected.append((kept, sum(map(len, sides)) - sum(map(len, kept))))
    found, skips = both(pairs, tagged, keep, max_length=limit)
    for row, (kept, cut) in zip(found, expected, strict=True):
        sides = [zip(*s, strict=True) for s in zip(row["input_ids"], row["loss_mask"], strict=True)]
        assert [[(tagged.decode([i]), bool(m)) for i, m in cells] for cells in sides] == kept
        assert row.get("num_cut_tokens") == (cut if keep else None)
    reason = "nothing_left_after_truncation" if keep == "answer_start" else "too_long"
    assert skips[reason] == skips.total() == len(pairs) - len(expected)
    assert len(expected) > 5


def test_a_token_over_the_boundary_belongs_to_the_answer_of_both_sides() -> None:
    """The other side has the prompt's own token there, which is never removed, and trained."""
    vocab = {token: i for i, token in enumerate(["x", "y", "q", "a", "b", "qa"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("q", "a")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    record = {"prompt": "xyq", "chosen": "a", "rejected": "bb"}
    [example], _ = both([record], tokenizer)
    assert example["loss_mask"] == [[0, 0, 1], [0, 0, 1, 1, 1]]
    with pytest.raises(DataError, match="the prompt is empty, or its tokens merge with those of"):
        both([{**record, "prompt": "q"}], tokenizer)
    [example], _ = both([record], tokenizer, "prompt_end", max_length=4)
    assert example["input_ids"] == [[vocab["y"], vocab["qa"]], [vocab[c] for c in "yqbb"]]
    [example], _ = both(
        [record | {"chosen": "bb", "rejected": "a"}], tokenizer, "prompt_end", max_length=4
    )
    assert example["input_ids"] == [[vocab[c] for c in "yqbb"], [vocab["y"], vocab["qa"]]]
    short = {"prompt": "x", "chosen": "y", "rejected": "q"}
    assert both([record, short], tokenizer, "prompt_end", max_length=3)[1] == {"too_long": 1}


# ---- labelled answers


def labelled(sizes: list[int], form: str = "strings") -> list[Record]:
    """Return rows of as many answers to each prompt as ``sizes`` has, all of one character."""
    names = [(f"{k}?", chr(256 + 100 * k + i)) for k, n in enumerate(sizes) for i in range(n)]
    rows = [{"prompt": p, "completion": c, "label": i % 3 == 0} for i, (p, c) in enumerate(names)]
    if form == "strings":
        return rows
    return [
        {
            **row,
            "prompt": [{**USER, "content": row["prompt"]}],
            "completion": [{**YO, "content": row["completion"]}],
        }
        for row in rows
    ]


@pytest.mark.parametrize("form", ["strings", "messages"])
@pytest.mark.parametrize("sizes", [[2] * 9, [1, 1], [5, 2, 3], [3, 1], [4], [1, 6, 1, 2]])
def test_other_answers(sizes: list[int], form: str, tagged: Any) -> None:
    rows = labelled(sizes, form)
    found, _ = both(rows, tagged)
    sides = [side(row["prompt"], row["completion"], tagged) for row in rows]
    asked = [mask.index(1) for _, mask in sides]
    partners = []
    for i, example in enumerate(found):
        ids, other = example["input_ids"]
        assert (ids, example["loss_mask"][0]) == sides[i]
        assert other[: asked[i]] == ids[: asked[i]]
        [j] = [j for j, s in enumerate(sides) if s[0][asked[j] :] == other[asked[i] :]]
        assert example["loss_mask"][1] == [0] * asked[i] + sides[j][1][asked[j] :]
        assert example["label"] == (i % 3 == 0)
        partners.append(j)
    assert sorted(partners) == list(range(len(rows)))
    assert all(i != j for i, j in enumerate(partners))
    prompts = np.repeat(np.arange(len(sizes)), sizes)
    num_same = int((prompts == prompts[partners]).sum())
    assert num_same == max(2 * max(sizes) - len(rows), 0)  # no permutation has fewer


def test_other_answers_follow_the_seed(tagged: Any) -> None:
    dataset = Dataset.from_list(labelled([2] * 20))
    first, again, other = (
        list(tokenize_preferences(dataset, tagged, seed=seed, num_proc=n)[0])
        for seed, n in ((0, None), (0, 2), (1, None))
    )
    assert first == again
    assert [row["input_ids"][0] for row in first] == [row["input_ids"][0] for row in other]
    assert [row["input_ids"][1] for row in first] != [row["input_ids"][1] for row in other]


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("keep", [None, "prompt_end", "answer_start"])
def test_other_answers_are_cut_and_never_lost(keep: Any, labels: bool) -> None:
    tagged = tokenizer_for("", "</s>")  # which adds no BOS
    sizes = np.random.default_rng(1).integers(1, 8, (40, 2)).tolist()
    rows = [{"prompt": "p" * p, "completion": "abcdefgh"[:n], "label": True} for p, n in sizes]
    found, skips = both(rows, tagged, keep, max_length=8, labels=labels)
    assert len(found) + skips.total() == 40
    assert len(found) > 20
    cut = 0
    for row in found:
        own, other = ("".join(map(tagged.decode, [[i] for i in ids])) for ids in row["input_ids"])
        prompt = own.count("p")
        target = row["labels" if labels else "loss_mask"]
        if labels:
            target = [[int(i != -100) for i in segment] for segment in target]
        assert target == [[0] * prompt + [1] * (len(s) - prompt) for s in (own, other)]
        assert own.startswith("p" * prompt + "a")
        assert other.startswith("p" * prompt + "a")
        assert "abcdefgh".startswith(other[prompt:])
        cut += len(other) == 8
    assert cut > 3


# ---- templates, and real answers


def test_a_prompt_that_is_rendered_by_what_follows_it() -> None:
    """Qwen3 drops thinking before the last question: a longer answer would change the prompt."""
    tokenizer = tokenizer_for(templates()["qwen3"], "<|im_end|>")
    thought = {**CALLS[0], "reasoning_content": "hm"}
    prompt = [USER, thought, {"role": "tool", "content": "x"}]
    good = {"prompt": prompt, "chosen": [YO], "rejected": [NO]}
    [example], _ = both([good], tokenizer)
    assert all("hm" in tokenizer.decode(ids) for ids in example["input_ids"])
    bad = {**good, "rejected": [NO, USER, YO]}
    message = (
        r"example 1: `rejected`: messages\[3\]: the .* renders what comes before .*; change the"
    )
    with pytest.raises(DataError, match=message):
        both([good, bad], tokenizer)


def test_a_prompt_that_opens_thinking_on_one_side() -> None:
    tokenizer = tokenizer_for(templates()["nemotron_3_nano"], "<|im_end|>")
    thinks = {**NO, "reasoning_content": "hm"}
    message = (
        r"example 0: the sides differ before their first trained token: `chosen` has '.*</think>' "
        r"and `rejected` has '.*<think>\\n'. Both need one prompt: .* another tokenizer.chat_templ"
    )
    with pytest.raises(DataError, match=message):
        both([{"prompt": [USER], "chosen": [YO], "rejected": [thinks]}], tokenizer)
    other = {"prompt": [USER], "chosen": [YO], "rejected": [{**USER, "content": "x"}, NO]}
    with pytest.raises(DataError, match="example 0: the sides differ before"):
        both([other], tokenizer)


# ---- real answers


@pytest.fixture(scope="module")
def mistral(shared_data: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "mistral-32k-chatml")


def test_good_and_bad_trials_with_tools(shared_data: Path, mistral: Any) -> None:
    """Whole trajectories, whose common turns are the prompt; users begin each in other words."""
    lines = (shared_data / "chat_tools_tau_airline_128.jsonl").read_text().splitlines()
    tools = (shared_data / "chat_tools_tau_airline.tools.json").read_text()  # JSON, as a column
    trials: dict[int, dict[float, Any]] = {}
    for row in map(json.loads, lines[:40]):
        trials.setdefault(row["task_id"], {})[row["reward"]] = row["messages"]
    pairs = [
        {"chosen": by[1.0], "rejected": by[1.0][:2] + by[0.0][2:], "tools": tools}
        for by in trials.values()
        if len(by) == 2
    ][:3]
    found, _ = both(pairs, mistral)
    assert len(found) == 3
    for pair, example in zip(pairs, found, strict=True):
        turns = zip(pair["chosen"], pair["rejected"], strict=False)
        same = len(list(itertools.takewhile(lambda two: two[0] == two[1], turns)))
        assert same > 1
        for name, ids, mask in zip(PAIR[1:], *map(example.get, COLUMNS), strict=True):
            said = pair[name]
            assert (ids, mask) == side(said[:same], said[same:], mistral, tools=tools)
            assert 0 < sum(mask) < len(mask)


def test_the_prompt_of_trl(tagged: Any) -> None:
    trl = pytest.importorskip("trl")
    chats = [r for r, *_ in FORMS.values() if "prompt" not in r]
    assert len(chats) > 5
    for record in chats:
        theirs = trl.extract_prompt(record)
        [ours], _ = both([record], tagged)
        [expected], _ = both([theirs], tagged)
        assert ours == expected


def test_labelled_answers_in_a_sampler(tagged: Any) -> None:
    """A label beside a loss mask is no misspelt `labels`."""
    examples, _ = tokenize_preferences(Dataset.from_list(labelled([2] * 4)), tagged)
    kept = TokenizedDataset(examples, columns=examples.column_names)
    tagged.pad_token = "<s>"
    collate = PackedCollator(tagged, max_tokens=64, fields={"label": PerExample(torch.bool)})
    sampler = PackedBatchSampler(kept, collate, batch_size=4, shuffle=False)
    batches = list(DataLoader(kept, batch_sampler=sampler, collate_fn=collate))
    labels = [value for batch in batches for value in batch["label"].values.tolist()]
    assert sorted(labels) == sorted(examples["label"])
    assert [batch.metadata["num_examples"] for batch in batches] == [4, 4]
    with pytest.raises(DataError, match="'label' looks like it"):
        TokenizedDataset({"input_ids": [[1, 2]], "label": [1]})
