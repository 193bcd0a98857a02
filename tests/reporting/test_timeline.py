"""The timeline of a loader."""

from __future__ import annotations

import pytest

from tests.test_batch_plot import plots
from torch_collate_kit import plot_timeline
from torch_collate_kit.loading import StepTimes

__all__ = ["plots"]  # a fixture

STEPS = [
    StepTimes(0, 0, 10.0, 11.0, 11.5, 10.0, 11.5, 13.5),  # built when it was asked for
    StepTimes(0, 1, 11.5, 12.5, 13.0, 13.5, 13.5, 15.0),  # hidden
    StepTimes(0, 2, 13.5, 15.5, 16.0, 15.0, 16.0, None),  # waited for one second of 2.5
]


def spans(ax) -> dict[str, list[tuple[float, float, int]]]:
    """Begin, end and lane of every bar."""
    found = {}
    for collection in ax.collections:
        boxes = [path.get_extents() for path in collection.get_paths()]
        found[collection.get_label()] = [
            (round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2)) for box in boxes
        ]
    return found


def test_bars_are_the_times_of_the_steps():
    ax = plot_timeline(STEPS)
    assert spans(ax) == {
        "collated": [(0, 1, 0), (1.5, 2.5, 0), (3.5, 5.5, 0)],
        "copied": [(1, 1.5, 0), (2.5, 3, 0), (5.5, 6, 0)],
        "waited for": [(0, 1.5, 1), (5, 6, 1)],
        "trained on": [(1.5, 3.5, 1), (3.5, 5, 1)],
    }
    # built in 1.5 + 1.5 + 2.5 s, of which 2.5 were waited for
    expected = "waited 2.50 s for batches that took 5.50 s to build: 55% hidden"
    assert ax.get_title() == expected
    assert [t.get_text() for t in ax.get_yticklabels()] == ["batch is built", "training loop"]
    assert ax.yaxis_inverted()
    numbers = [(t.get_text(), *t.get_position()) for t in ax.texts]
    assert numbers == [
        ("0", 0.75, 0),
        ("0", 2.5, 1),
        ("1", 2.25, 0),
        ("1", 4.25, 1),
        ("2", 4.75, 0),
    ]


def test_only_the_last_steps_are_drawn_and_counted():
    ax = plot_timeline(STEPS, num_steps=1)
    assert spans(ax)["collated"] == [(0, 2, 0)]
    assert ax.get_title().startswith("waited 1.00 s for batches that took 2.50 s")
    assert ax.get_xlabel() == "time (seconds); the last 1 step"


def test_what_did_not_happen_is_not_in_the_legend():
    step = StepTimes(0, 0, 1.0, 1.05, 1.05, 1.0, 1.05, 2.0)
    labels = [text.get_text() for text in plot_timeline([step]).get_legend().get_texts()]
    assert labels == ["collated", "waited for", "trained on"]


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plot_timeline([]), ValueError, r"the timeline is empty \(0 steps\); read batches"),
        (lambda: plot_timeline([3]), TypeError, "draws a PrefetchLoader, got list; pass the load"),
        (lambda: plot_timeline(3), TypeError, "draws a PrefetchLoader, got int"),
        (lambda: plot_timeline(STEPS, num_steps=0), ValueError, "num_steps must be at least 1"),
    ],
)
def test_bad_arguments(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
