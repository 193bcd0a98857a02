"""The audit of a dataset: a table of checks, each run on the same columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_bool, checked_optional_int
from torch_collate_kit.reporting.audit import (
    cut_checks,
    end_checks,
    id_checks,
    label_checks,
    repeat_checks,
    rollout_checks,
    target_checks,
    template_checks,
)
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.excerpts import excerpt, printable
from torch_collate_kit.reporting.audit.findings import AuditReport, Finding
from torch_collate_kit.reporting.audit.messages import MESSAGES
from torch_collate_kit.reporting.audit.reading import ReadRows, Refused
from torch_collate_kit.reporting.audit.sources import ChatSettings, read_dataset
from torch_collate_kit.reporting.audit.vocabulary import Vocabulary
from torch_collate_kit.vision import VisionLayout

__all__ = ["audit"]


@dataclass(frozen=True)
class _Check:
    """A check, and what it needs: names that :data:`_NEEDS` explains."""

    run: Callable[[AuditColumns], Found | None]
    needs: tuple[str, ...] = ()
    of_template: bool = False
    """Whether it is a check of the template, and not of rows alone."""


_NEEDS: dict[str, tuple[str, Callable[[AuditColumns], bool]]] = {
    "max_tokens": ("max_tokens=", lambda c: c.max_tokens is not None),
    "tokenizer": ("a tokenizer", lambda c: c.vocabulary.tokenizer is not None),
    "size": ("a tokenizer with a size", lambda c: c.vocabulary.size is not None),
    "bos": ("a tokenizer with a BOS token", lambda c: c.vocabulary.bos_id is not None),
    "eos": ("a tokenizer with an EOS token", lambda c: c.vocabulary.eos_id is not None),
    "pad": ("a tokenizer with a pad token", lambda c: c.vocabulary.pad_id is not None),
    "header": (
        "a tokenizer whose chat template has a generation prompt",
        lambda c: bool(c.vocabulary.header_ids),
    ),
    "template": (
        "a tokenizer with a chat template",
        lambda c: c.vocabulary.template is not None,
    ),
}

_CHECKS = (
    _Check(target_checks.masks_all_zero),
    _Check(target_checks.no_trained_token),
    _Check(target_checks.masks_all_one),
    _Check(target_checks.generation_prompt_trained, ("header",)),
    _Check(target_checks.empty_thinking_trained, ("tokenizer",)),
    _Check(cut_checks.target_truncated, ("max_tokens",)),
    _Check(cut_checks.prompt_longer_than_row, ("max_tokens",)),
    _Check(cut_checks.eos_truncated, ("eos",)),
    _Check(end_checks.eos_never_trained, ("eos",)),
    _Check(end_checks.eos_not_trained, ("eos",)),
    _Check(end_checks.eos_masked_as_pad, ("eos", "pad")),
    _Check(end_checks.pad_trained, ("pad",)),
    _Check(end_checks.padded_rows, ("pad",)),
    _Check(id_checks.double_bos, ("bos",)),
    _Check(id_checks.bos_in_some_rows, ("bos",)),
    _Check(id_checks.id_out_of_vocabulary, ("size",)),
    _Check(label_checks.labels_shifted),
    _Check(label_checks.labels_not_input_ids),
    _Check(label_checks.mask_shifted, ("header", "eos")),
    _Check(repeat_checks.duplicates),
    _Check(repeat_checks.contradictory_answers),
    _Check(rollout_checks.reward_without_variance),
    _Check(rollout_checks.logprobs_shifted),
    _Check(rollout_checks.logprobs_positive),
    _Check(template_checks.template_not_prefix_stable, ("template",), of_template=True),
    _Check(template_checks.eos_does_not_end_turns, ("template", "eos"), of_template=True),
)
_NOTHING = np.empty(0, dtype=np.int64)
_NO_ROWS = AuditColumns(_NOTHING, _NOTHING, _NOTHING, np.empty(0, dtype=np.bool_), False)
_ORDER = ("error", "warning", "note")
_LARGEST = 1 << 62  # no row is longer, and a place in the dataset added to it is still int64
_NO_ANSWER = (
    "none of the records, {rows}, has an answer that would be trained, so there is nothing to "
    "learn from; give each a turn of the assistant"
)


def audit(
    dataset: Any,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
    train_all: bool = False,
    train_on: str = "all",
    tools: Sequence[Any] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    image_root: Any = None,
    vision: VisionLayout | None = None,
) -> AuditReport:
    """Find supervision that looks healthy and is not.

    Args:
        dataset: examples or rollouts as the collators take them, a list or columns; a
            TokenizedDataset or its sources; or chat records, which are tokenized as
            :func:`~torch_collate_kit.tokenize_chat` does. It is read whole, and not changed.
        tokenizer: the tokenizer, or of a vision-language model the processor. Without it, what
            needs special tokens or a chat template is not checked, and examples are shown as ids.
        max_tokens: the length at which rows will be cut; None leaves that out.
        train_all: as of the collators, for examples without a loss target.
        train_on, tools, chat_template_kwargs, image_root: as of ``tokenize_chat``, for chat
            records.
        vision: how images become tokens; that of ``tokenizer`` if it is a processor.

    Returns an :class:`AuditReport`: findings with the numbers of the rows and one decoded example.
    Rows are numbered as in ``dataset``; of chat records a row is the record. What each check looks
    for, and when it is silent, is in docs/audit_checks.md. Memory: the tokens of the dataset twice.

    Raises:
        DataError: the dataset is empty, or no row of it can be read.
        TypeError, ValueError: a form of dataset that is not known, or a wrong option.

    >>> rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}] * 3
    >>> report = audit([*rows, {"input_ids": [5, 6, 8], "loss_mask": [0, 0, 0]}])
    >>> report.ok, report.names
    (False, ['no_trained_token', 'duplicates'])
    >>> report["no_trained_token"].rows, report["no_trained_token"].example
    (array([3]), 'row 3: \u27e65 6 8\u27e7')
    """
    max_tokens = checked_optional_int("max_tokens", max_tokens, hint="None leaves it out")
    if max_tokens is not None:
        max_tokens = min(max_tokens, _LARGEST)
    kwargs = dict(chat_template_kwargs or {})
    if vision is None and hasattr(tokenizer, "image_processor"):
        vision = VisionLayout.of(tokenizer)
    read = read_dataset(
        dataset,
        train_all=checked_bool("train_all", train_all),
        vision=vision,
        chat=ChatSettings(tokenizer, train_on, tools, kwargs, image_root),
    )
    vocabulary = Vocabulary.of(tokenizer, kwargs)
    columns = replace(read.columns or _NO_ROWS, vocabulary=vocabulary, max_tokens=max_tokens)
    found, not_checked = _run(columns)
    findings = [*_of_reading(read), *_with_records(found, read, columns)]
    findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    return AuditReport(
        findings,
        num_rows=len(read.refused) + len(read.without_answer) + len(columns.lengths),
        num_tokens=len(columns.ids),
        not_checked=not_checked,
    )


def _run(columns: AuditColumns) -> tuple[list[Finding], dict[str, str]]:
    """What all checks find, and what those need that could not run."""
    findings: list[Finding] = []
    not_checked: dict[str, str] = {}
    for check in _CHECKS:
        name = check.run.__name__
        missing = [_NEEDS[need][0] for need in check.needs if not _NEEDS[need][1](columns)]
        if not len(columns.lengths) and not check.of_template:
            continue
        if missing:
            not_checked[name] = missing[0]
            continue
        found = check.run(columns)
        if found is not None:
            findings.append(_finding(name, columns, found))
    return findings, not_checked


def _finding(name: str, columns: AuditColumns, found: Found) -> Finding:
    message = MESSAGES[name]
    numbers = np.unique(columns.numbers[found.rows])
    total = len(np.unique(columns.numbers))
    return Finding(
        name,
        found.severity or message.severity,
        message.text.format(rows=_of(len(numbers), total), **found.values),
        numbers,
        printable(excerpt(columns, found)),
    )


def _with_records(findings: list[Finding], read: ReadRows, columns: AuditColumns) -> list[Finding]:
    """With the chat records that give no row among those without a trained token."""
    skipped = read.without_answer
    if not len(skipped):
        return findings
    name = "no_trained_token" if len(columns.lengths) else "masks_all_zero"
    example = f"row {skipped[0]}: nothing in the record would be trained"
    known = next((finding for finding in findings if finding.name == name), None)
    numbers = skipped if known is None else np.union1d(known.rows, skipped)
    text = (MESSAGES[name].text if len(columns.lengths) else _NO_ANSWER).format(
        rows=_of(len(numbers), len(np.unique(columns.numbers)) + len(skipped))
    )
    shown = known.example if known is not None else example
    found = Finding(name, MESSAGES[name].severity, text, numbers, shown)
    return [found, *(finding for finding in findings if finding.name != name)]


def _of(count: int, total: int) -> str:
    return f"{count:,} of {total:,} row{'s' * (total != 1)}"


def _of_reading(read: ReadRows) -> list[Finding]:
    """What the readers refused, and what they were not told to read."""
    total = len(read.refused) + (0 if read.columns is None else len(read.columns.lengths))
    findings = []
    for name, of_images in (("placeholders_disagree_with_grids", True), ("refused", False)):
        rows = [row for row in read.refused if row.of_images == of_images]
        if rows:
            findings.append(_of_refused(name, rows, total))
    if read.has_unread_images:
        message = MESSAGES["images_not_checked"]
        findings.append(Finding("images_not_checked", message.severity, message.text))
    return findings


def _of_refused(name: str, rows: list[Refused], total: int) -> Finding:
    message = MESSAGES[name]
    numbers = np.array([row.number for row in rows], dtype=np.int64)
    reason = printable(rows[0].message)
    text = message.text.format(rows=_of(len(rows), total), reason=reason)
    return Finding(name, message.severity, text, numbers, reason)
