"""Preference pairs in `audit`: each planted defect is found in its rows, and clean pairs pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.reporting.clean_data import Example, chat_tokenizer, single_turn
from torch_collate_kit import TokenizedDataset, audit
from torch_collate_kit.ragged import Nested, Ragged

TOKENIZER = chat_tokenizer()
ROWS = set(range(3, 40, 10))  # damaged


def clean_pairs(count: int = 40) -> list[Example]:
    """Pairs of a right and a wrong answer, of which each is longer as often as the other."""
    pairs = []
    for i in range(count):
        question, extra = f"What is {7 * i} plus {i + 14}?", " I counted."
        answers = (
            f"It is {8 * i + 14}.{extra * (i % 2)}",
            f"It is {8 * i + 1}.{extra * (1 - i % 2)}",
        )
        sides = [single_turn(TOKENIZER, question, answer) for answer in answers]
        pair: Example = {key: [side[key] for side in sides] for key in sides[0]}
        pairs.append(pair | {"margin": 0.5, "score_chosen": 3.0, "score_rejected": 1.0})
    return pairs


def _equal(pair: Example) -> Example:
    return pair | {key: [pair[key][0]] * 2 for key in ("input_ids", "loss_mask")}


def _other_prompt(pair: Example) -> Example:
    (chosen, rejected), i = pair["input_ids"], pair["loss_mask"][0].index(1)
    return pair | {"input_ids": [[*chosen[: i - 9], 45, *chosen[i - 8 :]], rejected]}


def _all_trained(pair: Example) -> Example:
    return pair | {"loss_mask": [[1] * len(ids) for ids in pair["input_ids"]]}


def _untrained(pair: Example) -> Example:
    return pair | {"loss_mask": [pair["loss_mask"][0], [0] * len(pair["input_ids"][1])]}


def _long(pair: Example) -> Example:
    """The same tokens in the middle of every chosen answer."""
    ids, mask = pair["input_ids"], pair["loss_mask"]
    i = mask[0].index(1) + 2
    extra = TOKENIZER.encode(" and so on, and so on", add_special_tokens=False)
    longer = [[*ids[0][:i], *extra, *ids[0][i:]], ids[1]]
    return pair | {
        "input_ids": longer,
        "loss_mask": [[*mask[0][:i], *[1] * len(extra), *mask[0][i:]], mask[1]],
    }


DEFECTS: dict[str, tuple[str, str, Callable[[Example], Example], set[int]]] = {
    "equal sides": ("pair_sides_equal", "warning", _equal, ROWS),
    "two prompts": ("pair_prompts_differ", "warning", _other_prompt, ROWS),
    "no prompt on one side": (
        "pair_prompts_differ",
        "warning",
        lambda p: (
            p
            | {
                key: [p[key][0][p["loss_mask"][0].index(1) - 1 :], p[key][1]]
                for key in ("input_ids", "loss_mask")
            }
        ),
        ROWS,
    ),
    "the prompt trained": ("pair_prompt_trained", "warning", _all_trained, {*range(40)}),
    "a side without a target": ("no_trained_token", "warning", _untrained, ROWS),
    "long answers preferred": ("pair_lengths_tell", "warning", _long, {*range(40)}),
    "a negative margin": ("pair_margin_negative", "warning", lambda p: p | {"margin": -1.0}, ROWS),
    "scores the other way": (
        "pair_margin_negative",
        "warning",
        lambda p: p | {"score_chosen": 0.5},
        ROWS,
    ),
    "all scores the other way": (
        "pair_margin_negative",
        "error",
        lambda p: p | {"score_chosen": 0.5},
        {*range(40)},
    ),
}
ALSO = {"no prompt on one side": {"template_not_followed", "answer_without_header"}}


def planted(name: str) -> list[Example]:
    _, _, edit, rows = DEFECTS[name]
    return [edit(pair) if i in rows else pair for i, pair in enumerate(clean_pairs())]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_in_its_rows(name: str) -> None:
    wanted, severity, _, rows = DEFECTS[name]
    report = audit(planted(name))
    assert report.names == [wanted]
    finding = report[wanted]
    assert (finding.severity, set(finding.rows.tolist())) == (severity, rows)
    assert finding.example.startswith(f"row {min(rows)}, segment ")
    assert f"{len(rows)} of 40 rows" in finding.message
    assert report.num_rows == 40


def _columns(pairs: list[Example]) -> dict[str, Any]:
    return {key: [pair[key] for pair in pairs] for key in pairs[0]}


def _nested(pairs: list[Example]) -> dict[str, Any]:
    columns = _columns(pairs)
    for key in ("input_ids", "loss_mask"):
        rows = Ragged.from_rows([side for sides in columns[key] for side in sides])
        columns[key] = Nested(rows, np.arange(0, 2 * len(pairs) + 1, 2))
    return columns


def _arrow(pairs: list[Example]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(pairs)


FORMS: dict[str, Callable[[list[Example]], Any]] = {
    "columns": _columns,
    "ragged columns": _nested,
    "a Dataset": _arrow,
    "a table": lambda pairs: _arrow(pairs).data.table,
    "a TokenizedDataset": lambda pairs: TokenizedDataset(pairs, columns=list(pairs[0])),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_dataset_is_read_alike(form: str) -> None:
    pairs = [
        _equal(pair) if i in ROWS else pair for i, pair in enumerate(planted("a negative margin"))
    ]
    expected, report = audit(pairs), audit(FORMS[form](pairs))
    assert expected.names == ["pair_sides_equal", "pair_margin_negative"]
    assert report.to_dict() == expected.to_dict()


def _other_rejected(pair: Example) -> Example:
    chosen, rejected = pair["input_ids"]
    return pair | {"input_ids": [chosen, [*rejected[:-3], 45, *rejected[-2:]]]}


def _rated(pairs: list[Example]) -> list[Example]:
    """KTO rows, whose second segment is for another purpose."""
    keys = ("input_ids", "loss_mask")
    return [{**{k: p[k] for k in keys}, "label": i % 3 == 0} for i, p in enumerate(pairs)]


CLEAN: dict[str, Callable[[], list[Example]]] = {
    "pairs": clean_pairs,
    "one chosen answer in several pairs": lambda: [
        of for pair in clean_pairs() for of in (pair, _other_rejected(pair))
    ],
    "rated answers": lambda: _rated(clean_pairs()),
    "rated answers, equal by chance": lambda: _rated([*map(_long, map(_equal, clean_pairs()))]),
    "few pairs, of which the chosen answers are longer": lambda: [*map(_long, clean_pairs(12))],
    "one segment each": lambda: [
        {key: pair[key][:1] for key in ("input_ids", "loss_mask")} for pair in clean_pairs()
    ],
    "three answers": lambda: [
        {key: [*pair[key], pair[key][0]] for key in ("input_ids", "loss_mask")}
        for pair in clean_pairs()
    ],
    "answers that begin alike": lambda: [
        pair | {"loss_mask": [[0] * 5 + [1] * (len(ids) - 5) for ids in pair["input_ids"]]}
        for pair in clean_pairs()
    ],
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_pairs_have_no_finding(name: str) -> None:
    report = audit(CLEAN[name](), None)
    assert report.ok, report


def test_with_a_tokenizer_the_segments_are_read_as_turns() -> None:
    assert audit(clean_pairs(), TOKENIZER).ok
    names = audit(planted("the prompt trained"), TOKENIZER).names
    assert {"pair_prompt_trained", "masks_all_one"} <= set(names)


def test_copies_are_those_of_whole_examples() -> None:
    pairs = clean_pairs()
    report = audit([*pairs, pairs[3]])
    assert report.names == ["duplicates"]
    assert report["duplicates"].rows.tolist() == [3, 40]


def test_refused_rows_are_named_and_the_others_read() -> None:
    pairs = clean_pairs()
    pairs[4] = pairs[4] | {"input_ids": [pairs[4]["input_ids"][0], []]}
    pairs[9] = {key: of[0] if isinstance(of, list) else of for key, of in pairs[9].items()}
    report = audit(pairs)
    assert report.names == ["refused"]
    assert report["refused"].rows.tolist() == [4, 9]
    assert "row 4, segment 1 is empty" in report["refused"].message
