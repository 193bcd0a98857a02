"""Plots with matplotlib, which is loaded on use: each takes ``ax=None`` and returns the Axes."""

from __future__ import annotations

from torch_collate_kit.reporting.plots.bars import plot_balance, plot_efficiency
from torch_collate_kit.reporting.plots.lengths import plot_lengths
from torch_collate_kit.reporting.plots.rows import plot_rows

__all__ = ["plot_balance", "plot_efficiency", "plot_lengths", "plot_rows"]
