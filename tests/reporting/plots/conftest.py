"""Every plot is closed, calls no ``show`` and leaves matplotlib's settings as they were."""

from __future__ import annotations

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch):
    def shown(*_: object, **__: object) -> None:
        raise AssertionError("a plot was shown")

    monkeypatch.setattr(plt, "show", shown)
    before = dict(matplotlib.rcParams)
    yield
    plt.close("all")
    assert dict(matplotlib.rcParams) == before
