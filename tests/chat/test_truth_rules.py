"""Each rule of the truth alone, on a text with the trained part between double brackets."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chat.conversations import CONVERSATIONS, PLAIN
from tests.chat.families import Family, tokenizer_for
from tests.chat.truth import Case
from torch_collate_kit.errors import DataError

TEMPLATE = (
    "{% for m in messages if not (m.role == 'system' and silent) %}"
    "{{ '<' ~ m.role ~ '>\n' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ ' ' ~ (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '</' ~ m.role ~ '>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
FAMILY = Family("", "<assistant>\n", ("</assistant>",), "</assistant>")
ASK = "<user>\nzebra1 walks2</user>\n<assistant>\n"
GOOD = ASK + "[[lion3 sleeps4</assistant>]]\n"


def case_of(conversation: str, family: Family = FAMILY, **columns: Any) -> Case:
    record = {**CONVERSATIONS[conversation], **columns}
    return Case("", tokenizer_for(TEMPLATE, "</assistant>"), record, other=family)


def example(case: Case, marked: str) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    for i, piece in enumerate(re.split(r"\[\[|\]\]", marked)):
        found = case.tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += found
        mask += [i % 2] * len(found)
    return {"input_ids": ids, "loss_mask": mask, "skip_reason": ""}


def why(conversation: str, marked: str, mode: str = "last", **options: Any) -> str:
    case = case_of(conversation, **options)
    result = example(case, marked)
    return case.verdict(mode, [result] if mode == "each" else result).why


def test_the_right_example_is_right() -> None:
    case = case_of(PLAIN)
    assert case.verdict("all", example(case, GOOD)).kind == "right"
    assert case.verdict("each", [example(case, GOOD)]).kind == "right"


@pytest.mark.parametrize(
    ("conversation", "marked", "reason"),
    [
        (PLAIN, ASK + "lion3 sleeps4</assistant>\n", "nothing is trained"),
        (PLAIN, "[[" + ASK + "lion3 sleeps4</assistant>]]\n", r"words of messages \[0, 1\]"),
        (PLAIN, "<user>\n[[zebra1 walks2</user>]]\n", r"message \[0\], not the assistant's"),
        (PLAIN, ASK + "[[lion3 sleeps4]]</assistant>\n", "ends with '4'"),
        (PLAIN, ASK + "[[lion3 sleeps4</assistant>\n]]", r"ends with '\\n'"),
        (PLAIN, ASK + "[[lion3 sleeps4</assistant>\n</assistant>]]", "after the end of the turn"),
        (PLAIN, ASK + "l[[ion3 sleeps4</assistant>]]\n", "begins where"),
        (PLAIN, "zebra1 walks2\n<assistant>\n[[lion3 sleeps4</assistant>]]", "begins where"),
        (PLAIN, ASK + "[[lion3</assistant>]]\n", "'lion3 sleeps4' of messages"),
        (PLAIN, ASK + "[[so lion3 sleeps4</assistant>]]\n", "is not written so"),
        ("None answer", ASK + "[[None</assistant>]]\n", "trains 'None'"),
        ("weight 0 first", GOOD, "not to be trained"),
        ("documents", GOOD, "documents are not"),
        ("ends with a call", ASK + "[[look1 {}</assistant>]]\n", "the arguments"),
        ("ends with a call", ASK + '[[{"city": "oslo31"}</assistant>]]\n', "'look1' of messages"),
        (
            "parts of the user",
            "<user>\n[{'type': 'text', 'text': 'zebra1 walks2'}]</user>\n<assistant>\n"
            "[[lion3 sleeps4</assistant>]]\n",
            "list of parts",
        ),
    ],
)
def test_each_rule_finds_its_fault(conversation: str, marked: str, reason: str) -> None:
    assert re.search(reason, why(conversation, marked))


def test_json_of_json_is_found() -> None:
    call = ASK + r'[[look1 "{\"city\": \"oslo31\"}"</assistant>]]' + "\n"
    assert "JSON string of JSON" in why("ends with a call", call)


def test_a_system_message_that_is_dropped_is_found() -> None:
    found = why("system", GOOD, chat_template_kwargs={"silent": True})
    assert "the system's" in found


def test_the_table_is_a_witness_of_its_own() -> None:
    """The generation prompt of a template is not believed where the table has another header."""
    other = Family("", "<model>\n", ("</assistant>",), "</assistant>")
    assert "begins where" in why(PLAIN, GOOD, family=other)


def test_turns_are_counted() -> None:
    case = case_of("two turns")
    second = "<user>\ntiger5 runs6</user>\n<assistant>\n[[eagle7 flies8</assistant>]]\n"
    both, one = example(case, GOOD + second), example(case, GOOD)
    assert case.verdict("all", both).kind == case.verdict("each", [both]).kind == "right"
    assert case.verdict("each", [one, both]).why == "trains [1, 1, 3], not [1, 3]"
    assert case.verdict("all", one).why == "trains [1], not [1, 3]"
    assert case.verdict("last", both).why == "trains [1, 3], not [3]"
    assert case.verdict_of_turn(3, one).why == "trains [1], not 3"


def test_the_form_of_a_result() -> None:
    case = case_of(PLAIN)
    good = example(case, GOOD)
    assert case.verdict("each", good).why == "got dict"
    assert case.verdict("each", []).why == "got list"
    skipped = {"input_ids": [], "loss_mask": [], "skip_reason": "no_trained_tokens"}
    assert case.verdict("each", [good, skipped]).why == "one of several examples is skipped"
    assert case.verdict("all", skipped).kind == "skipped"
    for mask in ([1], [2] * len(good["input_ids"])):
        assert "does not fit" in case.verdict("all", {**good, "loss_mask": mask}).why
    spelled = [case.tokenizer.convert_tokens_to_ids(c) for c in "</assistant>"]
    ids = [*good["input_ids"][:-2], *spelled, good["input_ids"][-1]]
    mask = [*good["loss_mask"][:-2], *[1] * len(spelled), 0]
    changed = {**good, "input_ids": ids, "loss_mask": mask}
    assert case.verdict("all", changed).why == "the ids are not those of the text"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("the template is not valid; fix it " * 3), "ValueError"),
        (DataError("the chat template drops messages[1] content"), "names no way out"),
        (DataError("no; no"), "names no way out"),
        (DataError("messages[1] is rewritten; pass train_on='all' and so on"), "advises"),
    ],
)
def test_a_refusal_names_a_way_out(error: Exception, reason: str) -> None:
    assert reason in case_of(PLAIN).verdict("all", error).why


def test_a_good_refusal_is_a_refusal() -> None:
    error = DataError("messages[1] is rewritten by the template; pass train_on='each'")
    assert case_of(PLAIN).verdict("all", error).kind == "refused"
