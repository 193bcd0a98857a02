"""The audit of a dataset in any form: its rows as flat columns, and all checks run on them.

Rows are read by the readers of the collators. Those that a reader refuses are set aside with its
message, and the rest is read without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torch_collate_kit._checks import checked_bool, checked_choice, checked_optional_int
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import PerExample
from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.chat.dataset import bars_of_rank_0
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.preference.tokenize import preference_examples
from torch_collate_kit.ragged import span_indices
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.keys import KNOWN, MEDIA, first_with
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import (
    Source,
    are_nested,
    are_preferences,
    check_even,
    is_a,
    kind_of,
)
from torch_collate_kit.reporting.audit import checks, group_checks, text_checks, token_checks
from torch_collate_kit.reporting.audit.checks import Check
from torch_collate_kit.reporting.audit.columns import AuditColumns
from torch_collate_kit.reporting.audit.findings import SEVERITIES, AuditReport, Finding, Refused
from torch_collate_kit.reporting.audit.vocabulary import Vocabulary
from torch_collate_kit.vision import VisionLayout

# Findings of one severity are in this order
_MODULES = (checks, token_checks, text_checks, group_checks)
CHECKS = tuple(of for module in _MODULES for of in vars(module).values() if isinstance(of, Check))
_LARGEST = 1 << 62  # no row is longer, and a place in the dataset added to it is still int64
_NO_TARGET = "no loss target"
# Of examples that were cut when they were tokenized, and the columns of the audit
_CUTS = {"num_cut_tokens": "num_cut", "is_continued": "is_continued"}
_OF_PAIRS = ("margin", "score_chosen", "score_rejected", "label")
_ROWS_AT_A_TIME = 4096
_RECORDS_AT_A_TIME = 256


def audit(
    dataset: Any,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
    train_all: bool = False,
    chat: ChatOptions = DEFAULT_OPTIONS,
    vision: VisionLayout | None = None,
    targets: TargetKind = "next_token",
) -> AuditReport:
    """Find supervision that looks healthy and is not.

    Args:
        dataset: examples or rollouts in the form that collators accept, a list or columns; a
            TokenizedDataset or its sources; or chat records, which are tokenized as
            :func:`~torch_collate_kit.tokenize_chat` does, pairs and labelled answers as
            ``preference.tokenize_preferences`` does. It is read whole, and not changed.
        tokenizer: the tokenizer, or of a vision-language model the processor. Without it, what
            needs special tokens or a chat template is not checked, and examples are shown as ids.
        max_tokens: the length at which rows will be cut; None: they will not be.
        train_all: as in the collators, for examples without a loss target.
        chat: the options that chat records are tokenized with. Empty answers are not refused here,
            since they are a finding, and ``max_length`` is not applied.
        vision: how images become tokens; by default that of ``tokenizer`` if it is a processor.
        targets: as in the collators. Of "same_token", and of None with a ``label`` per example, are
            checked lengths (``max_tokens``: the positions of the model), labels, copies and garbled
            text; ``not_checked`` names the other checks.

    Returns an :class:`AuditReport`: findings with the numbers of the rows and one decoded example.
    Rows are numbered as in ``dataset``; of chat records a row is the record. What each check looks
    for, and when it is silent, is in docs/audit_checks.md. Memory: the tokens of the dataset twice.

    Raises:
        DataError: the dataset is empty, or no row of it can be read.
        TypeError, ValueError: an unknown form of dataset, or a wrong option.

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
        targets=targets,
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
            "the rows are chat records, which need a tokenizer; pass the "
            "tokenizer that the model is trained with"
        )
    pixels = chat.pixels and not hasattr(tokenizer, "image_processor")
    limits: dict[str, Any] = {"max_length": None, "overflow": None, "group_turns": False}
    options = replace(chat, allow_empty=True, labels=False, pixels=pixels, **limits)
    return ChatSetup(tokenizer, options)


@bars_of_rank_0()
def read_dataset(
    dataset: Any,
    *,
    train_all: bool,
    vision: VisionLayout | None,
    chat_setup: Callable[[], ChatSetup],
    borders: Sequence[str],  # tokens that begin or end turns
    targets: TargetKind = "next_token",
) -> AuditColumns:
    """Return the rows of a dataset in any form; DataError if none can be read."""
    source = Source(dataset, "dataset")
    kind = kind_of(source.names)
    if isinstance(dataset, Mapping) and kind is not None:
        check_even(dataset, next(key for key in dataset if kind_of([key]) == kind))
    if not len(source):
        raise DataError("the dataset is empty (0 rows); give at least one")
    checked_choice("targets", targets, ("next_token", "same_token", None))
    if targets != "next_token" and kind != "tokens":
        raise ValueError(f"{targets=} is for examples with input_ids, and the rows are {kind}")
    if kind == "chats" or are_preferences(source.names):
        bar: Any = nullcontext()
        if is_a(dataset, "datasets", "Dataset"):  # with progress, as its map shows it
            from datasets.utils import tqdm

            bar = tqdm(total=len(source), desc="Tokenizing chats", unit=" examples")
        with bar as shown:
            return _read_chats(source, chat_setup(), shown, borders)
    if isinstance(dataset, TokenizedDataset):
        train_all, vision = dataset._train_all, vision or dataset.vision
    elif source.is_arrow and kind != "rollouts":
        columns = None
        if targets is None:
            columns = [name for name in (*KNOWN, *_CUTS, "label") if name in source.names]
        elif "input_ids" in source.names and _are_pairs(source.part(0, 1)):
            columns = [name for name in (*KNOWN, *_CUTS, *_OF_PAIRS) if name in source.names]
        source = Source(TokenizedDataset(source.data, columns=columns, train_all=train_all))
    reader = _BlockReader(train_all, vision, targets)
    for start in range(0, len(source), _ROWS_AT_A_TIME):
        reader.read(source, start, min(start + _ROWS_AT_A_TIME, len(source)))
    read = reader.columns()
    if not len(read.lengths) and not any(row.of_images for row in read.refused):
        raise DataError(read.refused[0].message)
    return read


def _read_chats(source: Source, setup: ChatSetup, bar: Any, borders: Sequence[str]) -> AuditColumns:
    """Tokenize chat records, whose rows are numbered as the records are."""
    image_token_id = None if setup.images is None else setup.images.layout.image_token_id
    reader = _BlockReader()
    without_answer: list[int] = []
    forged: list[int] = []
    for start in range(0, len(source), _RECORDS_AT_A_TIME):
        stop = min(start + _RECORDS_AT_A_TIME, len(source))
        known: dict[int, Any] = {}
        for i, record in enumerate(source.records(start, stop), start):
            if isinstance(record, Mapping):
                known[i] = record
                if any(border in text for text in _texts(record) for border in borders):
                    forged.append(i)
                continue
            kind = type(record).__name__
            reader.refuse(i, f"a record is a mapping, such as one with messages, got {kind}")
        weighted: dict[bool, list[tuple[int, dict[str, Any]]]] = {False: [], True: []}
        results = _tokenized([*known.values()], setup, source)
        for i, found in zip(known, results, strict=True):
            if isinstance(found, DataError):
                reader.refuse(i, str(found))
                continue
            kept = [(i, example) for example in found if not example["skip_reason"]]
            weighted["weight" in found[0]] += kept
            without_answer += [] if kept else [i]
        for rows in filter(None, weighted.values()):
            reader.read_chats(rows, image_token_id)
        if bar is not None:
            bar.update(stop - start)
    without, numbers = (np.array(rows, dtype=np.int64) for rows in (without_answer, forged))
    return replace(reader.columns(), without_answer=without, forged=numbers)


def _texts(record: Mapping[str, Any]) -> list[str]:
    """Return the contents of the messages of a record, as texts."""
    lists = (value for value in record.values() if isinstance(value, list | tuple))
    messages = (m for entries in lists for m in entries if isinstance(m, Mapping))
    return [str(m.get("content", m.get("value"))) for m in messages]


def _tokenized(
    records: list[Any], setup: ChatSetup, source: Source
) -> list[list[dict[str, Any]] | DataError]:
    """Return the examples of each record, or why it is refused."""
    if not are_preferences(source.names):
        return tokenize_records(
            records, setup, from_arrow=getattr(source.data, "features", source.is_arrow)
        )
    if setup.options.train_on == "each":
        raise ValueError("train_on='each' is not for pairs; pass train_on='all' or 'last'")
    found = preference_examples(
        records, setup, from_arrow=getattr(source.data, "features", source.is_arrow)
    )
    return [result if isinstance(result, DataError) else [result] for result in found]


@dataclass
class _BlockReader:
    """A reader of blocks of rows, which halves a refused block until it is one row."""

    train_all: bool = False
    vision: VisionLayout | None = None
    targets: TargetKind = "next_token"
    refused: list[Refused] = field(default_factory=list)
    _blocks: dict[str, list[dict[str, np.ndarray]]] = field(default_factory=dict)
    """Columns of AuditColumns, in parts, by the form of their rows."""
    _uids: dict[Any, int] = field(default_factory=dict)
    _has_unread_images: bool = False
    _has_label: bool = False

    def refuse(self, number: int, message: str) -> None:
        """Record a row that no collator accepts."""
        self.refused.append(Refused(number, f"row {number}: {message}"))

    def read(self, source: Source, start: int, stop: int) -> None:
        """Read the examples or rollouts ``start`` to ``stop``."""
        examples: Any = None
        has_image = np.zeros(stop - start, dtype=np.bool_)
        try:
            examples = source.part(start, stop)
            if self.vision is None:
                examples, flags = _without_images(examples)
                has_image |= flags
                self._has_unread_images |= bool(has_image.any())
            found = self._found(examples, self.vision)
            columns = self._flat(found)
        except DataError as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                self.read(source, start, middle)
                self.read(source, middle, stop)
                return
            message = str(error).replace("example 0", f"row {start}", 1)
            self.refused.append(Refused(start, message, self._is_of_images(examples)))
            return
        if found.images is not None:
            has_image[[*found.images.units]] = True
        self._add(found, columns, np.arange(start, stop), has_image)

    def read_chats(
        self, rows: Sequence[tuple[int, Mapping[str, Any]]], image_token_id: int | None
    ) -> None:
        """Read tokenized chats of the same keys, each with the number of its record."""
        numbers, examples = zip(*rows, strict=True)
        names = [n for n in ("input_ids", "loss_mask", "weight") if n in examples[0]]
        numbers_of = [n for n in _OF_PAIRS if n in examples[0]]
        self._has_label |= "label" in numbers_of
        found = read_columns(
            {name: [e[name] for e in examples] for name in (*names, *numbers_of)},
            fields=dict.fromkeys(numbers_of, PerExample(torch.float64)),
        )
        columns = self._flat(found)
        columns["num_cut"] = np.array([e.get("num_cut_tokens", 0) for e in examples])
        has_image = np.zeros(len(numbers), dtype=np.bool_)
        if image_token_id is not None:
            starts = np.cumsum(columns["lengths"]) - columns["lengths"]
            has_image |= np.logical_or.reduceat(columns["ids"] == image_token_id, starts)
        self._add(found, columns, np.array(numbers), has_image)

    def _add(
        self,
        found: ExampleColumns,
        columns: dict[str, np.ndarray],
        numbers: np.ndarray,
        has_image: np.ndarray,
    ) -> None:
        """Keep a block of columns, with values per example repeated for each of its segments."""
        columns |= {"numbers": numbers, "has_image": has_image}
        if (offsets := found.segment_offsets) is not None:
            for name in ("numbers", "has_image", *_CUTS.values(), "margins"):
                columns[name] = np.repeat(columns[name], np.diff(offsets))
            columns["segments"] = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
        self._blocks.setdefault(_form(found), []).append(columns)

    def columns(self) -> AuditColumns:
        """Return all rows of the most common form; other rows are refused."""
        joined = {
            form: {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
            for form, blocks in self._blocks.items()
        }
        usual = max(joined, key=lambda form: len(joined[form]["numbers"]), default=_NO_TARGET)
        columns: dict[str, Any] = joined.pop(usual, {})
        for form, others in joined.items():
            what = f"it has {form}, the others have {usual}; give every row the same keys"
            for i in others["numbers"].tolist():
                self.refuse(i, what)
        return AuditColumns(
            **columns,
            has_target=not usual.startswith(_NO_TARGET),
            refused=sorted(self.refused, key=lambda row: row.number),
            are_labelled=self._has_label,
            targets=self.targets,
            has_unread_images=self._has_unread_images,
        )

    def _found(self, examples: Any, vision: VisionLayout | None) -> ExampleColumns:
        names = first_with(examples) if _are_mappings(examples) else {}
        fields = {name: PerExample(torch.int64) for name in _CUTS if name in names}
        if self.targets is None:
            fields |= {"label": PerExample(torch.float64)} if "label" in names else {}
        elif "input_ids" in names and _are_pairs(examples):
            self._has_label |= "label" in names
            fields |= {name: PerExample(torch.float64) for name in _OF_PAIRS if name in names}
        options: dict[str, Any] = {"train_all": self.train_all, "targets": self.targets}
        return read_columns(examples, rollouts=None, fields=fields, vision=vision, **options)

    def _is_of_images(self, examples: Any) -> bool:
        """Return whether an example that was refused is accepted without its images."""
        if self.vision is None or examples is None:
            return False
        try:
            self._found(_without_images(examples)[0], None).checked(limits=False)
        except DataError:
            return False
        return True

    def _flat(self, found: ExampleColumns) -> dict[str, np.ndarray]:
        """Return the columns, checked as by a collator but for log-probabilities over 0."""
        values = {name: column.values for name, column in found.checked(limits=False).items()}
        lengths, num_actions = found.lengths, found.num_actions
        columns = {"ids": values["input_ids"], "lengths": lengths}
        offsets = found.segment_offsets
        num_rows = len(lengths) if offsets is None else len(offsets) - 1
        for name, column in _CUTS.items():
            columns[column] = values.get(name, np.zeros(num_rows, dtype=np.int64))
        if offsets is not None:
            margins = [values["margin"]] if "margin" in values else []
            if "score_chosen" in values and "score_rejected" in values:
                margins.append(values["score_chosen"] - values["score_rejected"])
            columns["margins"] = np.min(margins or [np.full(num_rows, np.nan)], axis=0)
        if self.targets is None:
            none = np.zeros(len(columns["ids"]), dtype=np.bool_)
            return columns | {"trained": none, "classes": values.get("label", np.empty(0))}
        if "labels" in values:
            labels, trained = values["labels"], values["labels"] != IGNORE_INDEX
            return columns | {"trained": trained, "labels": labels, "classes": labels[trained]}
        trained = values["loss_weights"] != 0
        if not found.are_rollouts:
            return columns | {"trained": trained}
        assert num_actions is not None
        responses = span_indices(np.cumsum(lengths) - num_actions, num_actions)
        columns["trained"] = np.zeros(len(columns["ids"]), dtype=np.bool_)
        columns["trained"][responses] = trained
        starts = np.cumsum(num_actions) - num_actions
        scores = np.add.reduceat(values["rewards"], starts, dtype=np.float64)
        if offsets is not None:  # a rollout has one, over all of its segments
            scores = np.repeat(np.add.reduceat(scores, offsets[:-1]), np.diff(offsets))
        columns |= {
            "num_actions": num_actions,
            "scores": scores,
            "is_last_step": np.array(found.per_segment.get("is_last_step", [True] * len(lengths))),
        }
        if "rollout_logprobs" in values:
            columns["logprobs"] = np.full(len(columns["ids"]), np.nan, dtype=np.float32)
            columns["logprobs"][responses] = values["rollout_logprobs"]
        if "uids" in found.per_segment:
            known = self._uids
            uids = [known.setdefault(uid, len(known)) for uid in found.per_segment["uids"]]
            columns["uids"] = np.array(uids, dtype=np.int64)
        return columns


def _are_pairs(examples: Any) -> bool:
    """Return whether the first example has two segments."""
    is_table = isinstance(examples, Mapping)
    ids = examples["input_ids"] if is_table else [e.get("input_ids", ()) for e in examples[:1]]
    return are_nested(ids) and len(ids[0]) == 2


def _without_images(examples: Any) -> tuple[Any, list[bool] | bool]:
    """Return the examples without image fields, and whether each had one; False: none had."""
    if not _are_mappings(examples):
        return examples, False  # refused by the reader
    names = set(first_with(examples)) & set(MEDIA)
    if not names:
        return examples, False
    if isinstance(examples, Mapping):
        text = {key: column for key, column in examples.items() if key not in names}
        columns = zip(*(examples[name] for name in names), strict=True)
        return text, [any(entry is not None for entry in row) for row in columns]
    rows = [{key: value for key, value in e.items() if key not in names} for e in examples]
    return rows, [any(e.get(name) is not None for name in names) for e in examples]


def _are_mappings(examples: Any) -> bool:
    """Return whether examples are a mapping of columns, or rows that are mappings."""
    return isinstance(examples, Mapping) or all(isinstance(e, Mapping) for e in examples)


def _form(found: ExampleColumns) -> str:
    """Return the form of examples: the name of their target, or the fields of rollouts."""
    weight = () if found.weights is None else ("weight",)
    segments = () if found.segment_offsets is None else ("segments",)
    if not found.are_rollouts:
        target = _NO_TARGET if found.target is None else found.target.name
        classes = [c.name for c in found.fields if found.targets is None and c.name == "label"]
        return ", ".join([target, *classes, *weight, *segments])
    images = () if found.images is None else found.images.arrays
    names = [column.name for column in found.fields if column.name not in _CUTS]
    return ", ".join([*names, *images, *found.per_segment, *weight, *segments])
