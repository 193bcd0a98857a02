"""Tokenised rows, read at random without a Python object per token."""

from __future__ import annotations

from torch_collate_kit.loading.dataset.tokenized import TokenizedDataset

__all__ = ["TokenizedDataset"]
