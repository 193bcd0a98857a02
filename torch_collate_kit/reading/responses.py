"""The response tokens of pieces: the last tokens of their examples."""

from __future__ import annotations

import numpy as np

from torch_collate_kit.packing.rows import Pieces
from torch_collate_kit.ragged import span_indices


def last_of_examples(pieces: Pieces, lengths: np.ndarray, num_actions: np.ndarray) -> Pieces:
    """Return which of its example's last ``num_actions`` tokens each piece has."""
    prompts = (lengths - num_actions)[pieces.examples]
    ends = pieces.starts + pieces.lengths
    num_responses = np.clip(ends - prompts, 0, pieces.lengths - 1)
    return pieces._replace(starts=ends - num_responses - prompts, lengths=num_responses)


def last_tokens(pieces: Pieces, numbers: np.ndarray) -> np.ndarray:
    """Return the places of so many last tokens of each piece among all tokens."""
    return span_indices(np.cumsum(pieces.lengths) - numbers, numbers)
