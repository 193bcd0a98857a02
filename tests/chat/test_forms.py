"""One conversation in every form that people have it in: the same tokens, the same mask."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset

from tests.chat.conversations import CONVERSATIONS
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.test_tokenizers import CHATML, byte_level
from torch_collate_kit.chat import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.errors import DataError

TEMPLATES = templates()
Record = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    return tokenizer


def trained(result: Record, tokenizer: Any) -> str:
    pairs = zip(result["input_ids"], result["loss_mask"], strict=True)
    return str(tokenizer.decode([i for i, kept in pairs if kept]))


# ---- ShareGPT

SYNONYMS = [
    {"system": "system", "user": "human", "assistant": "gpt"},
    {"system": "system", "user": "user", "assistant": "assistant"},
]


@pytest.mark.parametrize("roles", SYNONYMS)
@pytest.mark.parametrize("mode", ["all", "last", "each"])
@pytest.mark.parametrize(
    "name", ["one turn", "system, three turns", "consecutive answers", "emoji"]
)
def test_share_gpt(name: str, mode: Any, roles: dict[str, str], tokenizer: Any) -> None:
    record = CONVERSATIONS[name]
    turns = [{"from": roles[m["role"]], "value": m["content"]} for m in record["messages"]]
    same = tokenize_chat({"conversations": turns}, tokenizer, ChatOptions(train_on=mode))
    assert same == tokenize_chat(record, tokenizer, ChatOptions(train_on=mode))


def test_share_gpt_with_a_call_is_the_call_or_refused() -> None:
    tokenizer = tokenizer_for(TEMPLATES["qwen3"], FAMILY_OF["qwen3"].eos)
    arguments = {"city": "oslo31"}
    turns = [
        {"from": "human", "value": "where3 now4"},
        {"from": "function_call", "value": json.dumps({"name": "look1", "arguments": arguments})},
        {"from": "observation", "value": "rain5 falls6"},
        {"from": "gpt", "value": "wet7 there8"},
    ]
    call = {"type": "function", "function": {"name": "look1", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "where3 now4"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain5 falls6"},
        {"role": "assistant", "content": "wet7 there8"},
    ]
    expected = tokenize_chat({"messages": messages}, tokenizer, ChatOptions(train_on="each"))
    assert (
        tokenize_chat({"conversations": turns}, tokenizer, ChatOptions(train_on="each")) == expected
    )


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "a1"}, {"from": "bing", "value": "b2"},
         {"from": "gpt", "value": "c3"}],
        [{"from": "human", "value": "a1"}, {"from": "function_call", "value": "no json"},
         {"from": "gpt", "value": "c3"}],
        [{"from": "human", "value": "a1"}, {"from": "gpt", "text": "c3"}],
        [{"from": "human", "value": 3}, {"from": "gpt", "value": "c3"}],
        [{"value": "a1"}, {"from": "gpt", "value": "c3"}],
        ["a1", "c3"],
        "a1",
    ],
)  # fmt: skip
def test_share_gpt_that_cannot_be_read_is_refused(turns: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="; "):
        tokenize_chat({"conversations": turns}, tokenizer)


# ---- prompt and completion


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("zebra1 walks2", " lion3"), ("a1\n", "\nb2"), ("", "b2"), ("a1 <|im_end|>", "é\U0001f981")],
)
def test_strings_are_joined_as_they_are(prompt: str, completion: str, tokenizer: Any) -> None:
    result = tokenize_chat({"prompt": prompt, "completion": completion}, tokenizer)
    ids = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
    assert result["input_ids"] == ids
    assert trained(result, tokenizer).endswith(completion)
    assert len(trained(result, tokenizer)) <= len(completion) + 2  # a token across the border


def test_completion_messages_are_trained_and_the_prompt_is_not(tokenizer: Any) -> None:
    messages = CONVERSATIONS["five turns"]["messages"]
    for cut in (1, 3, 5):
        record = {"prompt": messages[:cut], "completion": messages[cut:]}
        marked = [m | {"train": False} if m["role"] == "assistant" else m for m in messages[:cut]]
        expected = tokenize_chat({"messages": marked + messages[cut:]}, tokenizer)
        assert tokenize_chat(record, tokenizer) == expected
        assert trained(expected, tokenizer).count("<|im_end|>") == (11 - cut) // 2


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a1", "completion": [{"role": "assistant", "content": "b2"}]},
        {"prompt": [{"role": "user", "content": "a1"}], "completion": "b2"},
        {"completion": "b2"},
        {"prompt": "a1", "completion": 3},
    ],
)
def test_prompts_that_cannot_be_read_are_refused(record: Record, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="; "):
        tokenize_chat(record, tokenizer)


@pytest.mark.parametrize(
    "other",
    [
        {"conversations": [{"from": "human", "value": "x1"}, {"from": "gpt", "value": "y2"}]},
        {"prompt": "x1", "completion": "y2"},
        {"instruction": "x1", "output": "y2"},
    ],
)
def test_two_forms_in_one_record_are_one_or_refused(other: Record, tokenizer: Any) -> None:
    """Never the second in silence: `messages` is what is trained."""
    record = CONVERSATIONS["one turn"]
    try:
        result = tokenize_chat({**record, **other}, tokenizer)
    except DataError:
        return
    assert result == tokenize_chat(record, tokenizer)


def test_alpaca(tokenizer: Any) -> None:
    record = {"instruction": "zebra1 walks2", "output": "lion3 sleeps4"}
    expected = tokenize_chat(CONVERSATIONS["one turn"], tokenizer)
    assert tokenize_chat(record, tokenizer) == expected
    assert tokenize_chat({**record, "input": ""}, tokenizer) == expected


# ---- columns


def test_documents_stand_in_the_text(tokenizer: Any) -> None:
    printing = byte_level()
    printing.chat_template = "{% for d in documents %}{{ d.title + d.text }}{% endfor %}" + CHATML
    result = tokenize_chat(CONVERSATIONS["documents"], printing)
    assert "note61facts62 here63" in printing.decode(result["input_ids"])
    assert trained(result, printing) == "lion3 sleeps4<|im_end|>"
    with pytest.raises(DataError, match=r"documents.*; "):
        tokenize_chat(CONVERSATIONS["documents"], tokenizer)


@pytest.mark.parametrize("name", ["one turn", "five turns", "train", "empty answer"])
@pytest.mark.parametrize("mode", ["all", "last", "each"])
def test_labels(name: str, mode: Any, tokenizer: Any) -> None:
    options: Any = {"train_on": mode, "allow_empty": True}
    masks = tokenize_chat(CONVERSATIONS[name], tokenizer, ChatOptions(**options))
    labels = tokenize_chat(CONVERSATIONS[name], tokenizer, ChatOptions(labels=True, **options))
    pairs = [(masks, labels)] if isinstance(masks, dict) else zip(masks, labels, strict=True)
    for with_mask, with_labels in pairs:
        ids, mask = with_mask["input_ids"], with_mask["loss_mask"]
        expected = [i if kept else -100 for i, kept in zip(ids, mask, strict=True)]
        assert with_labels["labels"] == expected
        assert with_labels["input_ids"] == ids
        assert "loss_mask" not in with_labels


@pytest.mark.parametrize("key", ["weight", "train", "trainable"])
@pytest.mark.parametrize("values", [(0, 1), (1, 0), (False, True), (0.0, 1.0), (None, 0)])
def test_weights_select_turns(key: str, values: tuple[Any, Any], tokenizer: Any) -> None:
    messages = [dict(m) for m in CONVERSATIONS["two turns"]["messages"]]
    messages[1][key], messages[3][key] = values
    result = tokenize_chat({"messages": messages}, tokenizer)
    texts = [
        text + "<|im_end|>"
        for value, text in zip(values, ("lion3 sleeps4", "eagle7 flies8"), strict=True)
        if value is None or value
    ]
    assert trained(result, tokenizer) == "".join(texts)


@pytest.mark.parametrize("value", [0.5, 2, -1, "yes", "0", [1]])
def test_other_weights_are_refused(value: Any, tokenizer: Any) -> None:
    messages = [dict(m) for m in CONVERSATIONS["two turns"]["messages"]]
    messages[1]["weight"] = value
    for mode in ("all", "each"):
        with pytest.raises(DataError, match=r"messages\[1\].*weight.*; "):
            tokenize_chat({"messages": messages}, tokenizer, ChatOptions(train_on=mode))


# ---- Arrow

ARROW = [
    name
    for name in CONVERSATIONS
    if name not in ("call, None inside a dict", "documents", "thinking off", "thinking on")
    and not name.startswith(("parts of", "two parts"))  # Arrow has strings or lists, not both
]


@pytest.mark.parametrize(
    "template", ["qwen3", "llama3_1", "nemotron_3_nano", "gemma4_v5", "lfm2_v2"]
)
def test_records_that_went_through_arrow(template: str) -> None:
    """Arrow gives every message every key, with None where it had none."""
    tokenizer = tokenizer_for(TEMPLATES[template], FAMILY_OF[template].eos)
    for name in ARROW:
        try:
            expected = tokenize_chat(CONVERSATIONS[name], tokenizer, ChatOptions(train_on="each"))
        except DataError:
            continue
        dataset = Dataset.from_list([CONVERSATIONS[name]] * 2)
        rows, _skipped = tokenize_chat_dataset(dataset, tokenizer, ChatOptions(train_on="each"))
        got = [(row["input_ids"], row["loss_mask"]) for row in rows]
        wanted = [(e["input_ids"], e["loss_mask"]) for e in expected if not e["skip_reason"]]
        assert got == wanted * 2, name
        assert list(rows["record_index"]) == [0] * len(wanted) + [1] * len(wanted)
