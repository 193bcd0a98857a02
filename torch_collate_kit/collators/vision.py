"""Conversations with images, as they are, into batches: processed in the DataLoader's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from torch_collate_kit._checks import checked_choice
from torch_collate_kit._reprs import call_repr, changed_settings
from torch_collate_kit.batch import Batch
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatOptions, ChatSetup
from torch_collate_kit.chat.tokenize import tokenize_records
from torch_collate_kit.collators.packed import PackedCollator, changed_options
from torch_collate_kit.collators.padded import PaddedCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions, PlannedExamples
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.raw import is_sequence
from torch_collate_kit.vision import VisionLayout

__all__ = ["ExampleSizes", "VisionLanguageCollator"]

_RECORDS_AT_A_TIME = 1000
_DROPPED = ("too_long", "nothing_left_after_truncation")  # by max_length


class Records(Protocol):
    """A list of records, or a map-style dataset of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


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
        overflow: treatment of a conversation that no row holds, as in ``PackedCollator``.
        chat: how conversations become examples, see ``ChatOptions``; ``train_on`` is "all" or
            "last". A conversation over its ``max_length`` is treated by its own ``overflow``:
            truncated, never through an image, dropped, or by default refused. The batch's
            ``metadata`` counts what was cut and dropped. A plan knows only what was cut, so with
            one a conversation that ``max_length`` drops raises.
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
        overflow: Literal["raise", "truncate", "drop", "split"] | None = None,
        chat: ChatOptions = DEFAULT_OPTIONS,
        require_images: Literal["all"] | None = None,
        config: Any = None,
        pixel_dtype: Any = "float32",
        **options: Any,
    ) -> None:
        self.vision = VisionLayout.of(processor, config, pixel_dtype=pixel_dtype)
        checked_choice("require_images", require_images, ("all", None))
        self.require_images = require_images
        self.chat, self._processor = chat, processor
        self._setup = ChatSetup(processor, chat)
        _check_chat(chat)
        self.collator: PackedCollator | PaddedCollator
        if max_tokens is None and options.get("packing") is None:
            if max_patches is not None:
                raise ValueError(
                    f"max_patches={max_patches} limits packed rows, and there are none without "
                    "max_tokens; pass max_tokens, too"
                )
            if overflow is not None:
                raise ValueError(
                    f"overflow={overflow!r} is for conversations over max_tokens; pass max_tokens, "
                    "or chat=ChatOptions(max_length=..., overflow=...)"
                )
            self.collator = PaddedCollator(processor, vision=self.vision, **options)
        else:
            limits = {"max_tokens": max_tokens, "max_patches": max_patches, "overflow": overflow}
            options |= {name: limit for name, limit in limits.items() if limit is not None}
            self.collator = PackedCollator(processor, vision=self.vision, **options)

    def __repr__(self) -> str:
        of = f"<{type(self._processor).__name__}>"
        if isinstance(self.collator, PackedCollator):
            layout = changed_options(self.collator)
        else:
            layout = changed_settings(self.collator)
        images: dict[str, Any] = {} if self.chat == DEFAULT_OPTIONS else {"chat": self.chat}
        if self.require_images:
            images["require_images"] = "all"
        if self.vision.pixel_dtype != "float32":
            images["pixel_dtype"] = self.vision.pixel_dtype
        shown = {k: v for k, v in layout.items() if k not in ("vision", "dummy_image_tokens")}
        return call_repr(self, of, **shown, **images)

    @property
    def packing(self) -> PackingOptions:
        """What ``PackedBatchSampler(packing=...)`` takes.

        Raises:
            AttributeError: the collator pads.
        """
        if not isinstance(self.collator, PackedCollator):
            raise AttributeError("the collator pads; pass max_tokens= or packing= to pack")
        return self.collator.packing

    def __call__(self, examples: Sequence[Mapping[str, Any]] | PlannedExamples) -> Any:
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

    def sizes(self, examples: Records) -> ExampleSizes:
        """What a plan needs, from the text and the headers of the image files; decodes no image.

        ``examples`` are a list of records, or a map-style dataset of them, which is read in parts.
        A ``datasets.Image`` column decodes what is read; cast it to ``Image(decode=False)`` before.

        Raises:
            DataError: as when they are collated, but for what only decoding an image shows.
            TypeError: neither a list nor a dataset.
        """
        is_dataset = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
        if not is_dataset or isinstance(examples, Mapping | str | bytes):
            raise TypeError(
                "examples must be a list of records or a map-style dataset of them, got "
                f"{type(examples).__name__}"
            )
        lengths, patches, num_loss_tokens = [], [], []
        for start in range(0, len(examples), _RECORDS_AT_A_TIME):
            stop = min(start + _RECORDS_AT_A_TIME, len(examples))
            records = [examples[i] for i in range(start, stop)]
            for example in self._processed(records, pixels=False, start=start):
                lengths.append(len(example["input_ids"]))
                patches.append(self.vision.patches(example))
                num_loss_tokens.append(sum(example["loss_mask"][1:]))
        return ExampleSizes(
            np.array(lengths, dtype=np.int64), patches, np.array(num_loss_tokens, dtype=np.int64)
        )

    def _processed(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        pixels: bool = True,
        start: int = 0,
        or_dropped: bool = False,
    ) -> list[dict[str, Any]]:
        """``start``: the number of the first one, for messages.

        ``or_dropped``: one that ``max_length`` drops stays, with its reason.
        """
        if not is_sequence(examples):
            raise TypeError(
                f"examples must be a list of records, got {type(examples).__name__}; of a dataset "
                "pass dataset.select(range(i, j)).to_list()"
            )
        setup = self._setup
        if not pixels:
            setup = ChatSetup(self._processor, replace(self.chat, pixels=False))
        processed = []
        for i, found in enumerate(tokenize_records(examples, setup, from_arrow=False), start):
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


def _check_chat(chat: ChatOptions) -> None:
    """Refuse options with which a record is not one example with a loss mask and pixels."""
    for name, value in (("train_on", "each"), ("labels", True), ("pixels", False)):
        if getattr(chat, name) == value:
            raise ValueError(
                f"{name}={value!r} is not for this collator, which makes one example with a loss "
                "mask and pixels of each record; leave it out of chat"
            )


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
