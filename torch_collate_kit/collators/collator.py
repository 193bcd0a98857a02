"""The first and the last steps of every collator: its options, and a Batch of placed columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_collate_kit._checks import call_repr, changed_settings, checked_bool, checked_choice
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.fields import PerToken
from torch_collate_kit.batch.model_inputs import model_inputs
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.batch.placement import Placement, TargetKind
from torch_collate_kit.batch.storage import Columns, Storage
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.ragged import unchecked
from torch_collate_kit.reading.entries import DeclaredFields, checked_fields
from torch_collate_kit.reading.examples import ExampleColumns, RowColumns
from torch_collate_kit.vision import VisionLayout


class Collator:
    """Collator of tokens; ``names`` are keys and fields of its own, which no other may have."""

    train_all: bool  # of collators of SFT examples

    def __init__(
        self,
        tokenizer: Any,
        normalize_loss: bool,
        fields: DeclaredFields | None,
        vision: VisionLayout | None,
        names: tuple[str, ...],
        targets: TargetKind = "next_token",
    ) -> None:
        checked_choice("targets", targets, ("next_token", "same_token", None))
        self.targets = targets
        self.pad_token_id = _pad_token_id_of(tokenizer)
        if vision is None and hasattr(tokenizer, "image_processor"):
            vision = VisionLayout.of(tokenizer)
        elif vision is not None and not isinstance(vision, VisionLayout):
            raise TypeError(
                f"vision must be a VisionLayout, got {type(vision).__name__}; "
                "VisionLayout.of(processor, model.config)"
            )
        self.vision = vision
        self._of_images: tuple[str, ...] = ()  # positions and types of tokens
        if vision is not None:
            types = vision.family.token_types if vision.family.positions != "model" else ""
            positions = ("mrope_position_ids",) if vision.has_mrope else ()
            self._of_images = (*positions, types) if types else positions
            names = (*names, *self._of_images, *vision.fields)
        self.normalize_loss = checked_bool("normalize_loss", normalize_loss) and targets is not None
        self.fields = checked_fields(fields, (*names, "loss_weights"))

    def __repr__(self) -> str:
        return call_repr(self, str(self.pad_token_id), **changed_settings(self))

    @property
    def reading(self) -> dict[str, Any]:
        """The options of ``read_columns``, also for streams."""
        own = {"train_all": self.train_all, "fields": self.fields, "vision": self.vision}
        return {**own, "targets": self.targets}

    def _batch(
        self,
        placed: RowColumns,
        placement: Placement,
        names: tuple[str, ...],
        *,
        row_metadata: Mapping[str, Any],
        metadata: Mapping[str, Any],
        dropped: np.ndarray,
        cut: np.ndarray,
        num_loss_tokens_elsewhere: int = 0,
    ) -> Batch:
        """Return the Batch of placed examples; ``names`` are its fields."""
        specs = {**placed.specs, "input_ids": PerToken(torch.int64, placement.pad_token_id)}
        number = int(placed.num_trained.sum()) + num_loss_tokens_elsewhere
        divisor = max(1, number) if self.normalize_loss else 1
        counted = {"num_loss_tokens": number, "loss_mask_divisor": divisor}
        if self.targets is None:
            names, counted = tuple(n for n in names if n not in ("labels", "loss_mask")), {}
        row_offsets = placed.pieces.row_offsets
        per_piece = {
            "example_indices": placed.examples,
            "example_starts": placed.pieces.starts,
            "num_actions": placed.counts["responses"],
            "num_trained": placed.num_trained,
        }
        if placed.segment_numbers is not None:
            per_piece["segment_numbers"] = placed.segment_numbers
        if "examples" in placed.counts:  # dummy images are none
            is_example = placed.counts["examples"] > 0
            per_piece = {key: values[is_example] for key, values in per_piece.items()}
            row_offsets = np.append(0, np.cumsum(is_example))[row_offsets]
        ragged = {key: unchecked(values.copy(), row_offsets) for key, values in per_piece.items()}
        all_metadata: dict[str, Any] = {
            "response_length": placement.response_length,
            **counted,
            "step_num_tokens": int(placed.pieces.lengths.sum()),
            "step_num_cells": (len(row_offsets) - 1) * placement.width,
            **metadata,
            "num_dropped": len(dropped),
            "num_cut": len(cut),
            "dropped": tuple(dropped.tolist()),
            "cut": tuple(cut.tolist()),
        }
        if (types := placed.columns.get("token_type_ids")) is not None and len(types.values):
            if (least := int(types.values.min())) < 0:
                i = np.repeat(placed.examples, placed.pieces.lengths)[types.values.argmin()]
                raise DataError(f"example {i}: token_type_ids contain {least}; they count from 0")
            placement = replace(placement, num_token_types=int(types.values.max()) + 1)
        columns = Columns.of(placed.columns, specs, names, placement)
        storage = Storage(columns, {}, {**ragged, **row_metadata}, all_metadata)
        return Batch.of_storage(storage, check=False)


def _pad_token_id_of(tokenizer: Any) -> int:
    """Return the pad id of an int, a tokenizer or processor, or anything with ``pad_token_id``."""
    if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
        tokenizer = tokenizer.tokenizer
    pad_token_id: Any = tokenizer
    is_id = isinstance(tokenizer, int | np.integer) and not isinstance(tokenizer, bool)
    if not is_id:
        if not hasattr(tokenizer, "pad_token_id"):
            raise TypeError(
                "tokenizer must be an int pad id or have .pad_token_id, got "
                f"{type(tokenizer).__name__}; pass the tokenizer, or tokenizer.pad_token_id"
            )
        pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token (pad_token_id is None); set one, for instance "
            "tokenizer.pad_token = tokenizer.eos_token, or pass the pad id as an int"
        )
    if not isinstance(pad_token_id, int | np.integer):
        raise TypeError(f"pad_token_id must be an int, got {pad_token_id!r}")
    if pad_token_id < 0:
        raise ValueError(f"pad_token_id must be 0 or more, got {pad_token_id}; embeddings index it")
    return int(pad_token_id)


def check_options(targets: TargetKind, *, train_all: bool, packing: PackingOptions | None) -> None:
    """Refuse options with which targets of this kind have no place."""
    if targets == "next_token":
        return
    if train_all:
        raise ValueError(f"train_all=True trains next tokens, and {targets=}; remove one of them")
    if targets == "same_token" and packing is not None and packing.share_prefixes:
        raise ValueError(
            "share_prefixes lets several tokens be in one cell, where each would need a label of "
            'its own with targets="same_token"; remove share_prefixes'
        )
    for name in ("strategy", "overflow") if targets is None else ():
        if (value := getattr(packing, name, None)) in ("wrapped", "split"):
            raise ValueError(
                f"{name}={value!r} cuts an example into pieces, and with targets=None what is "
                'trained is of a whole example; pass overflow="truncate" or "drop"'
            )


class ForTrainer(ABC):
    """A collator that ``transformers.Trainer`` can use, through ``for_trainer()``."""

    fields: DeclaredFields
    targets: TargetKind

    @abstractmethod
    def make_batch(self, examples: Any, *, for_trainer: bool = False) -> Batch:
        """Return the Batch of the examples; for ``transformers.Trainer`` with its checks."""

    def for_trainer(self, model: nn.Module | None = None) -> TrainerCollator:
        """Return the collator for ``transformers.Trainer``: calls return ``batch.model_inputs()``.

        With ``model`` they return ``batch.model_inputs(model)``. The model is read now, so call
        ``isolate_mixers`` first.

        Examples must have a loss target, or the collator ``train_all=True``: Trainer removes a
        ``loss_mask`` column before the collator sees it.

        Raises:
            ValueError: the collator declares fields, which model inputs do not have, or shares
                prefixes; the model's loss is of other targets than the collator's.
            IsolationError: packed rows are wrong in the model, such as for a head that reads one
                cell of a row; or in calls pads on the left.

        >>> from torch_collate_kit import PackedCollator
        >>> collate = PackedCollator(0, max_tokens=6).for_trainer()
        >>> sorted(collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]))[:4]
        ['cu_seq_lens_k', 'cu_seq_lens_q', 'input_ids', 'labels']
        """
        return TrainerCollator(self, model)


class TrainerCollator:
    """A collator whose calls return ``batch.model_inputs()``, a dict; made by ``for_trainer()``.

    ``collate`` is the collator that it was made from.

    >>> from torch_collate_kit import PaddedCollator
    >>> PaddedCollator(0, train_all=True).for_trainer()([{"input_ids": [5, 6]}])["labels"]
    tensor([[-100,    6]])
    """

    def __init__(self, collate: ForTrainer, model: Any = None) -> None:
        if collate.fields:
            raise ValueError(
                f"for_trainer() returns what a model reads, so {', '.join(collate.fields)} would "
                "be lost; take the Batch, and batch.model_inputs() for the model"
            )
        if (packing := getattr(collate, "packing", None)) is not None and packing.share_prefixes:
            raise ValueError(
                "for_trainer() passes on labels per cell, and segments that share prefixes have "
                "several targets in one cell; remove "
                f"share_prefixes={packing.share_prefixes!r}, or take the Batch and token_loss"
            )
        self.collate = collate
        # not the model itself, which would be sent to the workers of a DataLoader
        self._kind = ModelKind.of("torch_varlen" if model is None else model)
        if packing is not None:
            self._kind.refuse_packed()
        self._kind.check_head(collate.targets, is_packed=packing is not None)

    def __repr__(self) -> str:
        return f"{self.collate!r}.for_trainer()"

    def __call__(self, examples: Any) -> dict[str, Any]:
        """Collate the examples into model inputs; refuse weights that labels cannot express."""
        batch = self.collate.make_batch(examples, for_trainer=True)
        weights = batch.column("loss_weights")
        if weights is not None and weights.is_floating_point():
            odd = weights[(weights != 0) & (weights != 1)]
            if len(odd):
                raise DataError(
                    "for_trainer() passes on labels, no loss_mask, but a token has weight "
                    f"{float(odd[0]):g}; give masks (and weights of examples) of 0 and 1, or take "
                    "the Batch and token_loss"
                )
        return model_inputs(
            batch, batch.stored(), self._kind, labels=True, mask=None, sliding_window=None
        )


def check_targets(columns: ExampleColumns, train_all: bool) -> None:
    """Check that labels alone determine what is trained."""
    if columns.are_rollouts:
        raise ValueError(
            "for_trainer() passes on labels alone, so the rewards of rollouts would be lost; take "
            "the Batch, and batch.model_inputs(labels=False) for the model"
        )
    if columns.target is None and not train_all and len(columns.lengths):
        raise DataError(
            "example 0 has no loss target: transformers.Trainer and TRL remove a loss_mask "
            "column before the collator sees it; give labels (ChatOptions(labels=True)), "
            "or set remove_unused_columns=False, or pass train_all=True to train every token"
        )
