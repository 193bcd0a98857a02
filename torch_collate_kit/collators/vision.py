"""Conversations with images, as they are, into batches: processed in the DataLoader's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy as np

from torch_collate_kit._checks import checked_choice
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.collators.packed import PackedCollator, changed_options
from torch_collate_kit.collators.padded import PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions, PlannedExamples
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.source import Examples, Source
from torch_collate_kit.vision import VisionLayout

__all__ = ["ExampleSizes", "VisionLanguageCollator"]

_RECORDS_AT_A_TIME = 1000
_DROPPED = ("too_long", "nothing_left_after_truncation")  # by max_length


class ExampleSizes(NamedTuple):
    """What a plan needs to know of conversations: pass its fields to ``PackedBatchSampler``."""

    lengths: np.ndarray
    """int64 [N], tokens of each."""
    patches: list[list[int]]
    """[N] lists, the patches of each image (tiles where the model cuts images up)."""
    num_loss_tokens: np.ndarray
    """int64 [N], trained tokens of each."""


class VisionLanguageCollator:
    """Collate conversations with images: tokenized, images processed, then padded or packed.

    Args:
        processor: the transformers processor of the model.
        max_tokens, max_patches: pack into rows of at most so many tokens and patches, as
            ``PackedCollator``; without ``max_tokens`` (or ``packing``) pad, as ``PaddedCollator``.
            ``options`` are those of that collator.
        train_on, allow_empty, tools, chat_template_kwargs, image_root, max_pixels: as of
            ``tokenize_chat``.
        max_length: the most tokens of a conversation.
        overflow: what becomes of a longer one, and of one that no row holds: "raise"; "truncate",
            never through an image, which drops it if nothing is left to train; "drop"; of rows also
            "split". The batch's ``metadata`` counts what was cut and dropped. A plan knows only
            what was cut, so with one a conversation that ``max_length`` drops raises.
        require_images: "all" refuses batches in which a conversation has no image.
        config: the model's config; needed to pack where several models have the processor.
        pixel_dtype: "float32", or "bfloat16" for half the bytes.

    Calling it takes a list of records (see docs/chat.md), or ``PlannedExamples`` of them, and
    returns a :class:`~torch_collate_kit.batch.Batch`.

    Raises:
        DataError: a record is wrong, or nothing of it is trained; names the example.
        ValueError, TypeError: a setting is wrong.

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
        train_on: Literal["all", "last"] = "all",
        max_length: int | None = None,
        overflow: Literal["raise", "truncate", "drop", "split"] | None = None,
        allow_empty: bool = False,
        tools: Sequence[Any] | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        image_root: str | PathLike[str] | None = None,
        max_pixels: int | None = None,
        require_images: Literal["all"] | None = None,
        config: Any = None,
        pixel_dtype: Any = "float32",
        **options: Any,
    ) -> None:
        self.vision = VisionLayout.of(processor, config, pixel_dtype=pixel_dtype)
        checked_choice("train_on", train_on, ("all", "last"))
        checked_choice("require_images", require_images, ("all", None))
        self.require_images = require_images
        self._chat = {
            "processor": processor,
            "train_on": train_on,
            "max_length": max_length,
            "overflow": _overflow_of_chats(overflow, max_length, options.get("packing")),
            "allow_empty": allow_empty,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "image_root": image_root,
            "max_pixels": max_pixels,
        }
        ChatOptions(None, **self._chat)  # wrong ones raise here, not in a worker
        self.collator: PackedCollator[Any] | PaddedCollator
        if max_tokens is None and options.get("packing") is None:
            if max_patches is not None:
                raise ValueError(
                    f"max_patches={max_patches} limits packed rows, and there are none without "
                    "max_tokens; pass max_tokens, too"
                )
            if overflow is not None and max_length is None:
                raise ValueError(
                    f"overflow={overflow!r} is of conversations over max_length or max_tokens, and "
                    "there is no limit; pass one of the two"
                )
            self.collator = PaddedCollator(processor, vision=self.vision, **options)
        else:
            limits = {"max_tokens": max_tokens, "max_patches": max_patches, "overflow": overflow}
            options |= {name: limit for name, limit in limits.items() if limit is not None}
            self.collator = PackedCollator(processor, vision=self.vision, **options)

    def __repr__(self) -> str:
        defaults = {"train_on": "all", "overflow": "raise", "allow_empty": False}
        chat = {k: v for k, v in self._chat.items() if v is not None and v != defaults.get(k)}
        of = f"<{type(chat.pop('processor')).__name__}>"
        if isinstance(self.collator, PackedCollator):
            layout = changed_options(self.collator)
        else:
            layout = changed_settings(self.collator)
        images: dict[str, Any] = {"require_images": "all"} if self.require_images else {}
        if self.vision.pixel_dtype != "float32":
            images["pixel_dtype"] = self.vision.pixel_dtype
        shown = {k: v for k, v in layout.items() if k not in ("vision", "dummy_image_tokens")}
        return call_repr(self, of, **{**shown, **chat, **images})

    @property
    def packing(self) -> PackingOptions:
        """What ``PackedBatchSampler(packing=...)`` takes.

        Raises:
            AttributeError: the collator pads.
        """
        if not isinstance(self.collator, PackedCollator):
            raise AttributeError("the collator pads; pass max_tokens= or packing= to pack")
        return self.collator.packing

    def __call__(self, examples: Examples | PlannedExamples) -> Any:
        if isinstance(examples, PlannedExamples):
            if not isinstance(self.collator, PackedCollator):
                raise TypeError(
                    "the examples come with a plan of packed rows; pass max_tokens= or packing="
                )
            processed = self._processed(examples.examples)
            self._check_images(processed)
            return self.collator(replace(examples, examples=processed))
        processed = self._processed(examples, or_dropped=True)
        kept = [i for i, example in enumerate(processed) if not example["skip_reason"]]
        if not kept:
            raise DataError(
                f"nothing is left of all {len(processed)} conversations of the batch after "
                "max_length; raise it"
            )
        chosen = [processed[i] for i in kept]
        self._check_images(chosen)
        batch = self.collator(chosen)
        if isinstance(batch, Batch):
            _count_lost(batch, processed, np.array(kept))
        return batch

    def sizes(self, examples: Examples) -> ExampleSizes:
        """What a plan needs, from the text and the headers of the image files; decodes no image.

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
                num_loss_tokens.append(sum(example["loss_mask"][1:]))
        return ExampleSizes(
            np.array(lengths, dtype=np.int64), patches, np.array(num_loss_tokens, dtype=np.int64)
        )

    def _processed(
        self,
        examples: Examples,
        *,
        pixels: bool = True,
        start: int = 0,
        or_dropped: bool = False,
    ) -> list[dict[str, Any]]:
        """``start``: the number of the first one, for messages.

        ``or_dropped``: one that ``max_length`` drops stays, with its reason.
        """
        source = Source(examples)
        records = source.records(0, len(source))
        options = ChatOptions(None, **self._chat, pixels=pixels)
        processed = []
        for i, found in enumerate(
            tokenize_records(records, options, from_arrow=source.is_arrow), start
        ):
            if isinstance(found, DataError):
                raise DataError(f"example {i}: {found}") from found
            (example,) = found
            reason = example["skip_reason"]
            if reason and not (or_dropped and reason in _DROPPED):
                raise DataError(
                    f"example {i}: {reason}, so that nothing of it would be "
                    "trained; filter such conversations out"
                )
            processed.append(example)
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


def _overflow_of_chats(
    overflow: str | None, max_length: int | None, packing: PackingOptions | None
) -> str:
    """What becomes of conversations over ``max_length``: the same as of those over a row."""
    overflow = overflow or ("raise" if packing is None else packing.overflow)
    if max_length is None:
        return "raise"
    if overflow == "split":
        raise ValueError(
            "overflow='split' is of packed rows, and a conversation over max_length is not split; "
            "leave max_length out, or pass overflow='truncate', 'drop' or 'raise'"
        )
    return overflow


def _count_lost(batch: Batch, processed: Sequence[Mapping[str, Any]], kept: np.ndarray) -> None:
    """What ``max_length`` cut and dropped into the metadata, and examples by their own numbers."""
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
