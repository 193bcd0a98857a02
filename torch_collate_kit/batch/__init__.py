"""Batch: what every collator returns, the fields that one can declare, and outputs per example."""

from torch_collate_kit.batch.batch import Batch
from torch_collate_kit.batch.fields import IGNORE_INDEX, PerExample, PerResponseToken, PerToken
from torch_collate_kit.batch.unpacking import unpack

__all__ = ["IGNORE_INDEX", "Batch", "PerExample", "PerResponseToken", "PerToken", "unpack"]
