"""Branches of rows that share prefixes, as segments of ``check_isolation``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch import Batch


def branches_of(batch: Batch) -> tuple[Tensor, list[int], np.ndarray]:
    """Return the branch of each cell [R, W], -1 at pads, their rows, and which see which.

    A branch has cells between which no path divides. The last is bool [S, S], whether a branch
    sees another.
    """
    placement, column = batch.placement, batch.stored().columns.values["tree_cells"]
    assert placement is not None
    cells = column.values.cpu().numpy().astype(np.int64)
    lengths = placement.segments["lengths"].values
    before = np.full(len(batch) * placement.tree_width, -1)  # the cell before; -2: none
    ends = np.cumsum(lengths)
    rows = placement.rows()
    for row, start, end in zip(
        rows.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True
    ):
        path = cells[start:end] + row * placement.tree_width
        before[path] = np.append(-2, path[:-1])[: len(path)]
    num_after = np.bincount(before[before >= 0], minlength=len(before))
    branches = np.full(len(before), -1)
    above: list[list[int]] = []
    of_rows: list[int] = []
    for cell in np.flatnonzero(before != -1).tolist():  # a path leads to later cells
        at = int(before[cell])
        if at >= 0 and num_after[at] == 1:
            branches[cell] = branches[at]
            continue
        branches[cell] = len(above)
        above.append([*(above[branches[at]] if at >= 0 else []), len(above)])
        of_rows.append(cell // placement.tree_width)
    sees = np.zeros((len(above), len(above)), dtype=bool)
    for branch, path in enumerate(above):
        sees[branch, path] = True
    ids = torch.from_numpy(branches).view(len(batch), -1)
    return ids.to(column.values.device), of_rows, sees
