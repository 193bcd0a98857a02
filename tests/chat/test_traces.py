"""Traces whose events form a tree become the conversations in them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.command import byte_tokenizer
from torch_collate_kit.chat import tokenize_chat, trace_paths
from torch_collate_kit.errors import DataError

IDS = {"parentUuid": "uuid", "parentId": "id"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def event(
    number: int, parent: int | None, role: str, text: str, key: str = "parentUuid", **others: Any
) -> dict[str, Any]:
    of = {IDS[key]: str(number), key: None if parent is None else str(parent)}
    return of | {"message": {"role": role, "content": text}} | others


def by_a_loop(events: list[dict[str, Any]], key: str) -> list[list[dict[str, Any]]]:
    """Return the paths of leaves, walking up from each."""
    own = IDS[key]
    nodes = [of for of in events if key in of and not of.get("isSidechain")]
    paths = []
    for leaf in nodes:
        if any(of[key] == leaf[own] for of in nodes):
            continue
        ancestors, place = [leaf[own]], leaf[key]
        while place is not None:
            ancestors.append(place)
            (place,) = [of[key] for of in nodes if of[own] == place]
        paths.append(
            [
                of
                for of in events
                if (key not in of and not of.get("isSidechain"))
                or (of.get(own) in ancestors and not of.get("isSidechain"))
            ]
        )
    return paths


def without_flags(paths: list[list[dict[str, Any]]]) -> Any:
    paths = copy.deepcopy(paths)
    for path in paths:
        for of in path:
            of.get("message", {}).pop("train", None)
    return paths


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
    assert without_flags(paths) == by_a_loop(events, key)
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


def test_refusals():
    with pytest.raises(DataError, match="event 0 is 'x'"):
        trace_paths(["x"])
    with pytest.raises(DataError, match="the parent '5' is missing"):
        trace_paths([event(1, 5, "user", "q")])
    with pytest.raises(DataError, match="event 1 has uuid '1'; each needs its own"):
        trace_paths([event(1, None, "user", "q"), event(1, None, "user", "q")])
    with pytest.raises(DataError, match="ancestor of itself"):
        trace_paths([event(1, 2, "user", "q"), event(2, 1, "user", "q")])
    with pytest.raises(DataError, match="ancestor"):
        trace_paths([event(1, 2, "user", "q"), event(2, 1, "user", "q"), event(3, 2, "user", "q")])
