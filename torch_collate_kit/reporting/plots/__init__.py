"""The plots of a packing report; matplotlib is loaded on use."""

from __future__ import annotations

from torch_collate_kit.reporting.plots.bars import draw_balance, draw_padding
from torch_collate_kit.reporting.plots.lengths import draw_lengths

__all__ = ["PLOTS"]

PLOTS = {"padding": draw_padding, "balance": draw_balance, "lengths": draw_lengths}
