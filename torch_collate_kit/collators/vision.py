"""Conversations with images, as they are, into batches: processed in the DataLoader's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from torch_collate_kit._checks import call_repr, changed_settings, checked_choice
from torch_collate_kit.batch import Batch
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.collators.collator import ForTrainer
from torch_collate_kit.collators.packed import PackedCollator
from torch_collate_kit.collators.padded import PaddedCollator
from torch_collate_kit.errors import DataError, examples_named
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.options import Overflow
from torch_collate_kit.packing.rank_plan import MixedExamples, PlannedExamples, named_in_errors
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.keys import is_other_weight
from torch_collate_kit.reading.source import Examples, Source
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.layout import PixelDtype

_RECORDS_AT_A_TIME = 1000
_DROPPED = ("too_long", "nothing_left_after_truncation")  # by max_length


class VisionSizes(NamedTuple):
    """Sizes of conversations, from which ``PackedBatchSampler`` plans rows."""

    lengths: np.ndarray
    """Number of tokens of each, int64 [N]."""
    patches: list[list[int]]
    """Number of patches of each image (tiles where the model cuts images up), N lists."""
    num_loss_tokens: np.ndarray
    """Number of trained tokens of each, int64 [N]."""


class VisionLanguageCollator(ForTrainer):
    """Collate conversations with images: tokenized, images processed, then padded or packed.

    Args:
        processor: the transformers processor of the model.
        max_tokens: pack into rows of at most so many cells, as ``PackedCollator``; without it (and
            without ``packing``) pad, as ``PaddedCollator``.
        overflow: what to do with a conversation longer than a row: "raise" (default), "truncate",
            "drop" or "split". One over ``chat.max_length`` goes by ``chat.overflow``; a plan knows
            only what was cut, so with one, a conversation that ``max_length`` drops raises.
        padding_side: "left" or "right", where rows are padded.
        chat: the :class:`~torch_collate_kit.ChatOptions` that conversations are tokenized with.
        config: the model's config; needed to pack where several models have the processor.
        pixel_dtype: "float32", or "bfloat16" for half the bytes.
        require_images: "all" refuses batches in which a conversation has no image.
        max_patches, packing, fixed_width, normalize_loss, fields: as in :class:`PackedCollator`.

    Calling it with records in any form (docs/chat.md), or with ``PlannedExamples`` of them, returns
    a new :class:`~torch_collate_kit.Batch`. ``metadata`` counts what was cut and dropped.

    Raises:
        DataError: a record is wrong, or nothing of it is trained; names the example.
        ValueError, TypeError: an option is wrong.

    >>> VisionLanguageCollator(processor=None)
    Traceback (most recent call last):
    TypeError: expected a processor with an image_processor, got NoneType; load it with
    AutoProcessor.from_pretrained, or see load_processor
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_tokens: int | None = None,
        max_patches: int | None = None,
        overflow: Overflow | None = None,
        packing: PackingOptions | None = None,
        padding_side: Literal["left", "right"] | None = None,
        chat: ChatOptions = DEFAULT_OPTIONS,
        config: Any = None,
        pixel_dtype: PixelDtype = "float32",
        require_images: Literal["all"] | None = None,
        fixed_width: bool = False,
        normalize_loss: bool = True,
        fields: DeclaredFields | None = None,
    ) -> None:
        self.vision = VisionLayout.of(processor, config, pixel_dtype=pixel_dtype)
        checked_choice("require_images", require_images, ("all", None))
        self.require_images = require_images
        self.chat, self._processor = chat, processor
        self._setup = ChatSetup(processor, chat)
        _check_chat(chat)
        self.collator: PackedCollator | PaddedCollator
        options: dict[str, Any] = {
            "normalize_loss": normalize_loss,
            "fields": fields,
            "vision": self.vision,
        }
        if max_tokens is None and packing is None:
            packed_only = {"max_patches": max_patches, "overflow": overflow}
            for name, value in {**packed_only, "fixed_width": fixed_width or None}.items():
                if value is not None:
                    raise ValueError(
                        f"{name}={value!r} is for packed rows; pass max_tokens, too, or limit "
                        "conversations by chat=ChatOptions(max_length=..., overflow=...)"
                    )
            side = "left" if padding_side is None else padding_side
            self.collator = PaddedCollator(processor, padding_side=side, **options)
        else:
            if padding_side is not None:
                raise ValueError(
                    f"padding_side={padding_side!r} is for padded rows, and max_tokens= or "
                    "packing= pack; leave one of them out"
                )
            options |= {"max_tokens": max_tokens, "max_patches": max_patches, "overflow": overflow}
            options |= {"packing": packing, "fixed_width": fixed_width}
            self.collator = PackedCollator(processor, **options)
        self.fields = self.collator.fields

    def __repr__(self) -> str:
        if isinstance(self.collator, PackedCollator):
            shown = self.collator.changed_options()
        else:
            shown = changed_settings(self.collator)
        del shown["vision"]
        if self.chat != DEFAULT_OPTIONS:
            shown["chat"] = self.chat
        if self.require_images:
            shown["require_images"] = "all"
        if self.vision.pixel_dtype != "float32":
            shown["pixel_dtype"] = self.vision.pixel_dtype
        return call_repr(self, f"<{type(self._processor).__name__}>", **shown)

    def __call__(self, examples: Examples | PlannedExamples) -> Batch:
        """Collate the records into a new Batch."""
        return self.make_batch(examples)

    def make_batch(self, examples: Any, *, for_trainer: bool = False) -> Batch:
        """Return the Batch of the records; for ``transformers.Trainer`` with its checks."""
        if isinstance(examples, PlannedExamples):
            if not isinstance(self.collator, PackedCollator):
                raise TypeError(
                    "the examples come with a plan of packed rows; pass max_tokens= or packing="
                )
            with named_in_errors(examples):
                processed = self._processed(examples.examples)
                self._check_images(processed)
            planned = replace(examples, examples=processed)
            return self.collator.make_batch(planned, for_trainer=for_trainer)
        processed = self._processed(examples, or_dropped=True)
        if not processed:
            raise DataError("the batch is empty (0 examples); give at least one")
        kept = [i for i, example in enumerate(processed) if not example["skip_reason"]]
        if not kept:
            raise DataError(
                f"nothing is left of all {len(processed)} conversations of the batch after "
                "max_length; raise it"
            )
        chosen = [processed[i] for i in kept]
        if isinstance(examples, MixedExamples):
            chosen = MixedExamples(chosen, examples.names, examples.sources[kept])
        with examples_named([f"example {i}" for i in kept].__getitem__):
            self._check_images(chosen)
            batch = self.collator.make_batch(chosen, for_trainer=for_trainer)
        _count_lost(batch, processed, np.array(kept))
        return batch

    def sizes(self, examples: Examples) -> VisionSizes:
        """Return what a plan needs, from the text and the headers of image files; decodes no image.

        ``examples`` are records in any form that collators accept; a dataset is read in parts.
        A ``datasets.Image`` column decodes what is read; cast it to ``Image(decode=False)`` before.

        Raises:
            DataError: as when they are collated, but for what only decoding an image shows.
            TypeError: no form of dataset.
        """
        source = Source(examples)
        lengths, patches, num_loss_tokens = [], [], []
        for start in range(0, len(source), _RECORDS_AT_A_TIME):
            records = source.records(start, min(start + _RECORDS_AT_A_TIME, len(source)))
            for example in self._processed(records, pixels=False, start=start):
                lengths.append(len(example["input_ids"]))
                patches.append(self.vision.patches(example))
                is_trained = example.get("weight", 1) != 0
                num_loss_tokens.append(sum(example["loss_mask"][1:]) if is_trained else 0)
        return VisionSizes(
            np.array(lengths, dtype=np.int64), patches, np.array(num_loss_tokens, dtype=np.int64)
        )

    def _processed(
        self, examples: Examples, *, pixels: bool = True, start: int = 0, or_dropped: bool = False
    ) -> list[dict[str, Any]]:
        """Tokenize records, the first of which has the number ``start``."""
        source, setup = Source(examples), self._setup
        if not pixels:
            setup = ChatSetup(self._processor, replace(self.chat, pixels=False))
        records = texts = source.records(0, len(source))
        if declared := {key for key in self.fields if is_other_weight(key)}:  # no weights then
            texts = [{k: value for k, value in row.items() if k not in declared} for row in records]
        tokenized = tokenize_records(
            texts, setup, from_arrow=getattr(source.data, "features", source.is_arrow)
        )
        processed = []
        for i, found in enumerate(tokenized, start):
            if isinstance(found, DataError):
                raise DataError(f"example {i}: {found}") from found
            (example,) = found
            reason = example["skip_reason"]
            if reason and not (or_dropped and reason in _DROPPED):
                raise DataError(
                    f"example {i}: {reason}, so that nothing of it would be "
                    "trained; filter such conversations out"
                )
            record = records[i - start]
            processed.append({**example, **{k: record[k] for k in self.fields if k in record}})
        return processed

    def _check_images(self, processed: Sequence[Mapping[str, Any]]) -> None:
        if self.require_images is None:
            return
        name = next(iter(self.vision.fields))
        without = [i for i, example in enumerate(processed) if name not in example]
        if without:
            raise DataError(
                f"example {without[0]} has no image, and require_images='all': "
                f"{len(without)} of {len(processed)} conversations of this batch have none; sort "
                "them into batches of their own, or pass require_images=None"
            )


def _check_chat(chat: ChatOptions) -> None:
    """Refuse options with which a record is not one example with a loss mask and pixels."""
    for name, value in (("train_on", "each"), ("labels", True), ("pixels", False)):
        if getattr(chat, name) == value:
            raise ValueError(
                f"{name}={value!r} is not for this collator, which makes one example with a loss "
                "mask and pixels of each record; leave it out of chat"
            )


def _count_lost(batch: Batch, processed: Sequence[Mapping[str, Any]], kept: np.ndarray) -> None:
    """Count what ``max_length`` cut and dropped, and number examples as they were given."""
    metadata = batch.metadata
    cut = {i for i in kept.tolist() if processed[i]["num_cut_tokens"]}
    cut |= set(kept[list(metadata["cut"])].tolist())
    dropped = set(range(len(processed))) - set(kept.tolist())
    dropped |= set(kept[list(metadata["dropped"])].tolist())
    for name, lost in (("cut", cut), ("dropped", dropped)):
        metadata |= {name: tuple(sorted(lost)), f"num_{name}": len(lost)}
    metadata["num_examples"] = len(processed)
    if len(kept) < len(processed):
        indices = batch.row_metadata["example_indices"]
        batch.row_metadata["example_indices"] = Ragged(kept[indices.values], indices.offsets)
