"""States as a run could have saved them, where a test changes one by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_collate_kit.loading.checks import sealed


def resealed(state: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The state with other values, and the checksum of these."""
    return sealed({**{k: v for k, v in state.items() if k != "checksum"}, **changes})
