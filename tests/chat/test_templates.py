"""Every template, made and random conversations, every mode: right or refused."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.chats import refused
from tests.chat.conversations import CONVERSATIONS, PLAIN, call, schema, text
from tests.chat.families import FAMILY_OF, templates, tokenizer_for
from tests.chat.made_templates import OTHERS, STOPS
from tests.chat.truth import MODES, Case, Verdict, outcome, outcomes

TEMPLATES = templates()
# How many of the conversations are taken by "all", "last" and "each", at least.
TAKEN = {
    (0, 1, 0): "deepseek_r1_distill deepseekv3 deepseekv3_training",
    (2, 3, 2): "deepseek_r1_distill_training",
    (24, 60, 60): "qwen3",
    (29, 29, 29): "gemma gemma_training",
    (29, 31, 29): "llava_next llava_next_training",
    (32, 32, 32): "cohere cohere_training gemma3 gemma3_training",
    (32, 33, 33): "cohere2 cohere2_training",
    (34, 58, 58): "gptoss gptoss_training",
    (36, 36, 36): "idefics3 idefics3_training smolvlm smolvlm_training",
    (37, 37, 37): "phi3 phi3_5 phi3_5_training phi3_training",
    (38, 38, 38): ("lfm2 lfm2_training llama3 llama3_training qwen2_5_vl qwen2_5_vl_training"),
    (38, 58, 57): "qwen3_5_nothink qwen3_5_think qwen3_6",
    (49, 52, 52): "glm4moe",
    (52, 53, 52): "gemma4 gemma4_v3 gemma4_v4",
    (52, 55, 52): "llama3_1 llama3_2",
    (54, 55, 54): ("lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training qwen3_vl qwen3_vl_training"),
    (55, 56, 55): "gemma4_v2 qwen3_instruct_2507 qwen3_instruct_2507_training",
    (55, 57, 56): "diffusion_gemma diffusion_gemma_training gemma4_v5",
    (56, 59, 57): "muse_glimmer muse_glimmer_training",
    (56, 59, 58): (
        "nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano "
        "nemotron_3_nano_training nemotron_3_super nemotron_3_super_training "
        "nemotron_3_ultra nemotron_3_ultra_training"
    ),
    (56, 59, 59): "glm4moe_training",
    (57, 58, 57): (
        "qwen3_5_nothink_training qwen3_5_think_training qwen3_6_training qwen3_8 qwen3_8_training"
    ),
    (57, 59, 59): "lfm2_2_5_vl",
    (58, 60, 60): "lfm2_2_5 lfm2_2_5_v2",
    (60, 60, 60): "qwen3_training",
}


Found = dict[tuple[str, str], tuple[Verdict, Any]]  # by conversation and mode
LEAST = {name: counts for counts, names in TAKEN.items() for name in names.split()}


def test_every_template_has_a_line() -> None:
    assert set(LEAST) >= set(TEMPLATES)  # an older TRL ships fewer


# A template for training is its plain one with marks around what the assistant says.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.release]
            * (name.removesuffix("_training") in TEMPLATES and name.endswith("_training")),
        )
        for name in sorted(TEMPLATES)
    ],
)
def test_trl_templates_against_the_truth(name: str) -> None:
    """Nor refused that was taken; a plain chat is taken. One test, as the outcomes take long."""
    found = outcomes(name, tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos))
    assert not {key: verdict.why for key, (verdict, _) in found.items() if verdict.kind == "wrong"}
    opens_think = name.startswith("deepseek")  # for a turn which has none in the text
    assert (found[PLAIN, "all"][0].kind == "right") != opens_think
    right = Counter(mode for (_, mode), (verdict, _) in found.items() if verdict.kind == "right")
    assert all(right[mode] >= least for mode, least in zip(MODES, LEAST[name], strict=True)), right
    check_modes_agree(found)
    check_advice_is_good(found)


def check_modes_agree(found: Found) -> None:
    """What "all" takes, "each" takes as the same one example, and "last" takes its last turn."""
    for conversation in CONVERSATIONS:
        (every, whole), (last, _end), (each, parts) = (found[conversation, mode] for mode in MODES)
        if every.kind == "right":
            assert each.kind == last.kind == "right", conversation
            assert parts == [whole], conversation
        if every.kind == "refused" and each.kind == "right":
            assert "train_on='each'" in every.why, (conversation, every.why)
        if each.kind == "right":
            assert last.kind == "right", (conversation, last.why)


def check_advice_is_good(found: Found) -> None:
    """A refusal that names another train_on is of a record which that one takes."""
    for (conversation, mode), (verdict, _) in found.items():
        for other in MODES:
            if verdict.kind == "refused" and f"train_on='{other}'" in verdict.why:
                kind = found[conversation, other][0].kind
                assert kind == "right", (conversation, mode, verdict.why)


MADE = OTHERS | STOPS
TAKEN_OF_MADE = {  # by "all", "last" and "each", at least
    (36, 38, 36): ["deepseek_v3_1"],
    (30, 34, 30): ["llama_2"],
    (37, 37, 37): ["vicuna"],
    (34, 37, 35): ["apertus"],
    (35, 37, 35): ["no second prompt", "header in the question"],
    (39, 39, 39): ["granite"],
    (38, 38, 38): ["laguna", "two ends", "a named closing tag, then EOS"],
    (1, 2, 2): ["qwq"],
    (36, 37, 36): ["merging"],
    (0, 0, 0): ["ascii", "kimi_k3, names after tags, no EOS"],
    (61, 61, 61): ["kimi_k3", "kimi_k3, names after tags"],
    (38, 55, 38): ["nameless closing tag alone"],
    (59, 61, 59): ["command_r7b"],
    (35, 54, 35): ["command_a"],
    (56, 60, 56): ["command_a, no prompt"],
    (52, 56, 53): ["mistral_v3", "mistral_v7"],
    (58, 60, 58): ["mistral_v13"],
    (56, 57, 56): ["two stops"],
}  # fmt: skip
TOKENS = re.compile(r"\[/?[A-Z_]+\]")
NAMED = ("<|{}_start|>", "<|{}_end|>", "<|start_{}|>", "<|end_{}|>")


def made_tokenizer(name: str) -> Any:
    """With the tokens that the template writes in pieces, too."""
    template, family = MADE[name]
    tokenizer = tokenizer_for(template, family.eos)
    tokens = [*family.ends, *TOKENS.findall(template)]
    if name in STOPS:
        tokens += [form.format(role) for form in NAMED for role in ("user", "assistant", "system")]
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in tokens if token not in known], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", MADE)
def test_made_templates_against_the_truth(name: str) -> None:
    found = outcomes(name, made_tokenizer(name), MADE[name][1])
    wrong = {key: verdict.why for key, (verdict, _) in found.items() if verdict.kind == "wrong"}
    assert not wrong
    taken = Counter(mode for (_, mode), (verdict, _) in found.items() if verdict.kind == "right")
    [least] = [counts for counts, names in TAKEN_OF_MADE.items() if name in names]
    for mode, count in zip(MODES, least, strict=True):
        assert taken[mode] >= count, (mode, taken[mode], found[PLAIN, mode])


@pytest.mark.parametrize("name", ["command_a", "command_a, no prompt", "mistral_v7"])
def test_an_answer_to_a_message_without_a_header_is_refused(name: str) -> None:
    """The text of a question ends with the header, or with what stands for it."""
    asked = {"role": "user", "content": "zebra1"}
    for role in ("system", "assistant"):
        messages = [asked, {"role": role, "content": "rule2"}, {**asked, "role": "assistant"}]
        message = f"no header after a message of the {role}"
        refused({"messages": messages}, made_tokenizer(name), message, train_on="last")


def test_a_turn_with_its_end_inside_is_refused() -> None:
    tokenizer = made_tokenizer("nameless closing tag alone")
    for name in ("call, dict", "parallel calls", "reasoning, one turn"):
        message = r"writes '<\|close\|>', which ends this turn, inside"
        refused(CONVERSATIONS[name], tokenizer, message)


EDGES = ["", " ", "\n", "\n\n", "  \n", "\t", "\r\n", "\u00a0", "\u200d", "\u0301", "\u65e5",
         "\u0643", "\U0001f981", "'", '"', "\\", "<", "}", "{{", "{%", "#", "`", "[", "|",
         "user\n", "<think>", "</think>", "{end}", "{header}"]  # fmt: skip
edges = st.sampled_from(EDGES)


@cache
def tokenizer_of(name: str) -> Any:
    if name in MADE:
        return made_tokenizer(name)
    return tokenizer_for(TEMPLATES[name], FAMILY_OF[name].eos)


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """Any order of roles with at least one answer; every word is numbered anew."""
    numbers = iter(range(100, 1000))

    def word() -> str:
        return f"w{next(numbers)}"

    def said(spaced: bool = True) -> str:
        between = draw(edges) if spaced else " "
        return f"{draw(edges)}{word()}{between or ' '} {word()}{draw(edges)}"

    roles = draw(
        st.lists(st.sampled_from(["user", "assistant", "call", "system"]), min_size=0, max_size=5)
    )
    messages: list[dict[str, Any]] = []
    called = 0
    for role in [*draw(st.sampled_from([["user"], ["system", "user"]])), *roles, "assistant"]:
        if role == "call":
            calls = []
            for _ in range(draw(st.integers(1, 2))):
                values = st.sampled_from([said(), 3, 1.5, True, None, [said()], {word(): said()}])
                arguments: Any = {word(): draw(values) for _ in range(draw(st.integers(0, 2)))}
                calls.append(call(arguments, called := called + 1, "look1"))
            content = draw(st.sampled_from([None, "", said()]))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [
                {"role": "tool", "content": said(), "tool_call_id": c["id"], "name": "look1"}
                for c in calls
            ]
            continue
        content = said() if draw(st.integers(0, 9)) else ""
        if role == "user" and not content:
            content = word()
        message: dict[str, Any] = {"role": role, "content": content}
        if draw(st.integers(0, 7)) == 0 and content:
            message["content"] = text(content, said())
        if role == "assistant" and draw(st.integers(0, 3)) == 0:
            message["reasoning_content"] = said()
        messages.append(message)
    record: dict[str, Any] = {"messages": messages}
    return {**record, "tools": [schema("look1")]} if called else record


@given(chats(), st.sampled_from([*sorted(TEMPLATES), *MADE]))
def test_random_conversations_against_the_truth(record: dict[str, Any], name: str) -> None:
    family = MADE[name][1] if name in MADE else None
    case = Case(name, tokenizer_of(name), record, other=family)
    for mode in MODES:
        verdict, _ = outcome(case, mode)
        assert verdict.kind != "wrong", (mode, verdict.why)
