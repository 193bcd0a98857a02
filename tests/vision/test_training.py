"""A tiny model learns from packed images, on one rank and on two of which one has no image."""

from __future__ import annotations

import pytest

from tests.ranks import on_two_ranks
from tests.vision.alone import alone, alone_gradients
from tests.vision.two_ranks_images import FAMILY, on_rank, ranks_examples


def test_a_rank_without_an_image_trains_on_with_the_others() -> None:
    pytest.importorskip("accelerate")
    found, _ = on_two_ranks(on_rank)
    assert found["num_processes"] == 2
    assert found["num_dummy_images"] == 1
    assert sorted(found["num_images"]) == [1, 1], "one of them is the dummy"
    examples = ranks_examples()
    assert sum("pixel_values" in example for example in examples) == 1
    each = [alone(FAMILY, FAMILY.model(), example)[1:] for example in examples]
    loss_sums, counts = zip(*each, strict=True)
    assert found["loss"] == pytest.approx(float(sum(loss_sums)) / sum(counts), abs=1e-5)
    expected = alone_gradients(FAMILY, examples)
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found["gradients"][name] - gradient).abs().max() < 1e-4, name
