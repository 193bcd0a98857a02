"""Packing: from lengths to a plan of rows. Integers in, integers out; torch is never imported.

Legend: E examples, Q segments of all examples, S pieces (atoms), R rows, C cuts; int64 arrays with
more than one plausible layout have the suffix. Offsets and bounds have one entry more.
"""

from torch_collate_kit.packing.options import ModelCost, PackingOptions, ParallelLayout
from torch_collate_kit.packing.plan import PackingPlan
from torch_collate_kit.packing.planner import pack
from torch_collate_kit.packing.rank_plan import RankPlan

__all__ = ["ModelCost", "PackingOptions", "PackingPlan", "ParallelLayout", "RankPlan", "pack"]
