"""Hypothesis: uids of rows that lie prompt by prompt."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def grouped_uids(draw: st.DrawFn, max_prompts: int = 6, max_rows: int = 4) -> list[str]:
    """Uids of rows that lie prompt by prompt."""
    counts = draw(st.lists(st.integers(1, max_rows), min_size=1, max_size=max_prompts))
    return [f"p{i}" for i, count in enumerate(counts) for _ in range(count)]
