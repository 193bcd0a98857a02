"""The audit of a dataset: all checks, run on the same columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_collate_kit._checks import checked_bool, checked_optional_int
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.reporting.audit import (
    answer_checks,
    dataset_checks,
    group_checks,
    logprob_checks,
    pair_checks,
    target_checks,
    text_checks,
    token_checks,
)
from torch_collate_kit.reporting.audit.check import Check
from torch_collate_kit.reporting.audit.findings import SEVERITIES, AuditReport, Finding
from torch_collate_kit.reporting.audit.reading import read_dataset
from torch_collate_kit.reporting.audit.vocabulary import Vocabulary
from torch_collate_kit.vision import VisionLayout

# Findings of one severity are in this order
_MODULES = (
    dataset_checks,
    target_checks,
    token_checks,
    answer_checks,
    text_checks,
    group_checks,
    pair_checks,
    logprob_checks,
)
CHECKS = tuple(
    found for module in _MODULES for found in vars(module).values() if isinstance(found, Check)
)
_LARGEST = 1 << 62  # no row is longer, and a place in the dataset added to it is still int64


def audit(
    dataset: Any,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
    train_all: bool = False,
    chat: ChatOptions = DEFAULT_OPTIONS,
    vision: VisionLayout | None = None,
) -> AuditReport:
    """Find supervision that looks healthy and is not.

    Args:
        dataset: examples or rollouts as the collators take them, a list or columns; a
            TokenizedDataset or its sources; or chat records, which are tokenized as
            :func:`~torch_collate_kit.tokenize_chat` does, pairs and labelled answers as
            ``preference.tokenize_preferences`` does. It is read whole, and not changed.
        tokenizer: the tokenizer, or of a vision-language model the processor. Without it, what
            needs special tokens or a chat template is not checked, and examples are shown as ids.
        max_tokens: the length at which rows will be cut; None leaves that out.
        train_all: as of the collators, for examples without a loss target.
        chat: the options that chat records are tokenized with. Empty answers are not refused here,
            since they are a finding, and ``max_length`` is not applied.
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
    if vision is None and hasattr(tokenizer, "image_processor"):
        vision = VisionLayout.of(tokenizer)
    vocabulary = Vocabulary(tokenizer, chat.template_variables)
    read = read_dataset(
        dataset,
        train_all=checked_bool("train_all", train_all),
        vision=vision,
        chat_setup=lambda: _chat_setup(tokenizer, chat),
        borders=vocabulary.texts([[token] for token in vocabulary.border_ids]),
    )
    columns = replace(read, vocabulary=vocabulary, max_tokens=max_tokens)
    findings: list[Finding] = []
    not_checked: dict[str, str] = {}
    for check in CHECKS:
        missing = check.missing(columns)
        if missing is None and (finding := check.finding(columns)):
            findings.append(finding)
        elif missing:
            not_checked[check.name] = missing
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return AuditReport(
        findings,
        num_rows=len(columns.refused) + len(columns.without_answer) + len(columns.heads),
        num_tokens=len(columns.ids),
        not_checked=not_checked,
    )


def _chat_setup(tokenizer: Any, chat: ChatOptions) -> ChatSetup:
    """Return the options for a tokenizer or processor, whose images are read without pixels."""
    if tokenizer is None:
        raise ValueError(
            "the rows are chat records, which only a tokenizer makes tokens of; pass the "
            "tokenizer that the model is trained with"
        )
    pixels = chat.pixels and not hasattr(tokenizer, "image_processor")
    options = replace(chat, allow_empty=True, max_length=None, labels=False, pixels=pixels)
    return ChatSetup(tokenizer, options)
