"""Collators for ``transformers.Trainer``, which passes what they return to the model as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.model_inputs import model_inputs
from torch_collate_kit.batch.model_kind import ModelKind
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.entries import DeclaredFields
from torch_collate_kit.reading.examples import ExampleColumns


class ForTrainer(ABC):
    """A collator that ``transformers.Trainer`` can use, through ``for_trainer()``."""

    fields: DeclaredFields

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
                prefixes.
            IsolationError: packed rows are wrong in the model, or in calls pads on the left.

        >>> from torch_collate_kit import PackedCollator
        >>> collate = PackedCollator(0, max_tokens=6).for_trainer()
        >>> sorted(collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]))[:4]
        ['cu_seq_lens_k', 'cu_seq_lens_q', 'input_ids', 'labels']
        """
        return TrainerCollator(self, model)


class TrainerCollator:
    """A collator whose calls return ``batch.model_inputs()``, a dict; made by ``for_trainer()``.

    ``collate`` is the collator that it was made from.

    Raises:
        ValueError: the collator declares fields, which model inputs do not have, or shares
            prefixes.

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
    """Check that labels alone say what is trained."""
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
