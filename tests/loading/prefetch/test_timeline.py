"""``PrefetchLoader.timeline``: when each batch was collated, waited for and trained on."""

from __future__ import annotations

import time
from itertools import chain, pairwise

import pytest
import torch
from torch.utils.data import DataLoader

from torch_collate_kit import PrefetchingSampler, PrefetchLoader

STEPS = [
    (0, 0, 10.0, 11.0, 11.5, 10.0, 11.5, 13.5),  # built when it was asked for
    (0, 1, 11.5, 12.5, 13.0, 13.5, 13.5, 15.0),  # hidden
    (0, 2, 13.5, 15.5, 16.0, 15.0, 16.0, None),  # waited for one second of 2.5
]


class Clock:
    """Seconds that pass only where a test says so; for loaders without a thread."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def loader_of(num_examples, batch_size, collate, **options) -> PrefetchLoader:
    sampler = PrefetchingSampler(num_examples, batch_size=batch_size, shuffle=False)
    data = DataLoader(range(num_examples), batch_sampler=sampler, collate_fn=collate)
    return PrefetchLoader(data, **options)


def test_times_by_a_clock_that_is_told(clock):
    def collate(rows):
        clock.sleep(1 + rows[0])
        return rows

    with loader_of(4, 2, collate, prefetch=False) as loader:
        for _ in loader.steps(3):
            clock.sleep(10)
            assert loader.timeline[-1].train_ended is None  # until it asks for the next one
    assert loader.timeline == [
        (0, 0, 100, 101, 101, 100, 101, 111),
        (0, 1, 111, 114, 114, 111, 114, 124),
        (1, 0, 124, 125, 125, 124, 125, 135),
    ]
    assert [step.build_seconds for step in loader.timeline] == [1, 3, 1]
    assert [step.wait_seconds for step in loader.timeline] == [1, 3, 1]
    assert not any(step.was_ahead for step in loader.timeline)
    assert loader.wait_seconds == 5


@pytest.mark.parametrize("leave", ["break", "close", "new loop", "error"])
def test_training_ends_where_a_loop_is_left(clock, leave):
    with loader_of(6, 2, list, prefetch=False) as loader:
        batches = iter(loader)
        next(batches)
        clock.sleep(7)
        if leave == "break":
            batches.close()
        elif leave == "error":
            with pytest.raises(KeyError):
                batches.throw(KeyError())
        elif leave == "new loop":
            other = iter(loader)
            next(other)
        else:
            loader.close()
        assert loader.timeline[0].train_ended == 107
        clock.sleep(50)  # evaluation, say
        if leave == "new loop":
            assert loader.timeline[1].train_ended is None
            batches.close()  # the old loop is garbage; the new one trains on
            assert loader.timeline[1].train_ended is None
            assert next(other) == [4, 5]
            assert loader.timeline[1].train_ended == 157
        elif leave != "close":
            assert list(loader) == [[2, 3], [4, 5]]
            assert loader.timeline[1].wait_began == 157
            assert loader.timeline[0].train_ended == 107


def test_waits_add_up_over_slow_batches_and_epochs(clock):
    """``wait_seconds`` also has the ends of epochs, which gave no batch."""

    class SlowEnd(PrefetchingSampler):
        def __iter__(self):
            return chain(super().__iter__(), self.nothing())

        def nothing(self):
            clock.sleep(10)
            yield from ()

    data = DataLoader(
        range(6), batch_sampler=SlowEnd(6, batch_size=2), collate_fn=lambda _: clock.sleep(1)
    )
    with PrefetchLoader(data, prefetch=False) as loader:
        for _ in loader.steps(7):
            clock.sleep(100)
        steps = loader.timeline
        assert [step.wait_seconds for step in steps] == [1] * 7
        assert loader.wait_seconds == 7 + 2 * 10
    assert [(step.epoch, step.step) for step in steps] == [(i // 3, i % 3) for i in range(7)]


# ---- the plot ----


@pytest.fixture
def drawn(monkeypatch):
    """Draw these steps; no figure is shown or left open."""
    pytest.importorskip("matplotlib").use("Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))

    def draw(steps, **options):
        with loader_of(2, 2, list) as loader:
            list(loader)
            kind = type(loader.timeline[0])
            monkeypatch.setattr(PrefetchLoader, "timeline", [kind(*step) for step in steps])
            return loader.plot_timeline(**options)

    yield draw
    plt.close("all")


def spans(ax) -> dict[str, list[tuple[float, float, int]]]:
    """Begin, end and lane of every bar."""
    found = {}
    for collection in ax.collections:
        boxes = [path.get_extents() for path in collection.get_paths()]
        found[collection.get_label()] = [
            (round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2)) for box in boxes
        ]
    return found


def test_bars_are_the_times_of_the_steps(drawn):
    ax = drawn(STEPS)
    assert spans(ax) == {
        "collated": [(0, 1, 0), (1.5, 2.5, 0), (3.5, 5.5, 0)],
        "copied": [(1, 1.5, 0), (2.5, 3, 0), (5.5, 6, 0)],
        "waited for": [(0, 1.5, 1), (5, 6, 1)],
        "trained on": [(1.5, 3.5, 1), (3.5, 5, 1)],
    }
    # built in 1.5 + 1.5 + 2.5 s, of which 2.5 were waited for
    assert ax.get_title() == "waited 2.50 s for batches that took 5.50 s to build: 55% hidden"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["batch is built", "training loop"]
    assert ax.yaxis_inverted()
    numbers = [(int(t.get_text()), *t.get_position()) for t in ax.texts]
    assert numbers == [(0, 0.75, 0), (0, 2.5, 1), (1, 2.25, 0), (1, 4.25, 1), (2, 4.75, 0)]


def test_the_last_steps_are_drawn_on_the_given_axes_with_what_happened_in_them(drawn):
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2)
    step = (0, 3, 16.0, 16.05, 16.05, 16.0, 16.05, 17.0)
    ax = drawn([*STEPS, step], num_steps=1, ax=right)
    assert ax is right
    assert not left.has_data()
    assert plt.get_fignums() == [left.figure.number]
    assert ax.get_xlabel() == "time (seconds); the last 1 step"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["collated", "waited for", "trained on"]
    ax.figure.canvas.draw()
    assert all(not t.get_window_extent().overlaps(ax.bbox) for t in ax.get_legend().get_texts())


def test_a_copy_to_a_device_is_timed_alone(clock, monkeypatch):
    def collate(rows):
        clock.sleep(1)
        return torch.tensor(rows)

    with loader_of(2, 2, collate, prefetch=False, device="meta") as loader:
        send = loader._to_device.send

        def slow_send(batch):
            clock.sleep(3)
            return send(batch)

        monkeypatch.setattr(loader._to_device, "send", slow_send)
        (batch,) = loader
    assert batch.device.type == "meta"
    (step,) = loader.timeline
    assert (step.collate_began, step.collate_ended, step.copy_ended) == (100, 101, 104)
    assert step.build_seconds == 4


def test_what_is_built_ahead_is_not_waited_for():
    """Real time: 20 ms to collate, and training ends after that; all but the first is hidden."""

    def collate(rows):
        time.sleep(0.02)
        return rows

    with loader_of(12, 2, collate) as loader:
        for _ in loader.steps(6):
            assert loader._at.reading.is_settled(loader._at, None)  # the next one is there
        steps = loader.timeline
        assert sum(step.wait_seconds for step in steps) == pytest.approx(loader.wait_seconds)
    assert [step.step for step in steps] == list(range(6))
    assert [step.was_ahead for step in steps] == [False] + [True] * 5
    assert all(step.build_seconds > 0.019 for step in steps)
    assert steps[0].wait_seconds > 0.019
    for before, step in pairwise(steps):
        assert before.wait_began < step.collate_began < step.copy_ended < before.train_ended
        assert before.wait_ended < before.train_ended <= step.wait_began < step.wait_ended


def test_the_last_thousand_steps_are_kept():
    with loader_of(2100, 2, list, prefetch=False) as loader:
        list(loader)
        assert [step.step for step in loader.timeline] == list(range(50, 1050))
        loader.timeline.clear()  # a copy
        assert len(loader.timeline) == 1000
