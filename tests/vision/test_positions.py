"""M-RoPE positions of batches: those of the models' own get_rope_index, and of a slow loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.building import packed_collator
from tests.devices import NoWaiting
from tests.strategies import FUZZ
from tests.vision.batches import cells_of, layout_of, mrope_positions
from tests.vision.families import FAMILIES, MROPE, Example
from torch_collate_kit import PaddedCollator, ParallelLayout
from torch_collate_kit.batch import Batch
from torch_collate_kit.vision import VisionLayout

SMALL = VisionLayout("qwen2_vl", image_token_id=9, merge_size=2, patch_shape=(1, 2, 1))
MODELS = [name for name in MROPE if name not in ("qwen3_vl_moe", "glm4v_moe")]
NUM_EXAMPLES = 400  # of each of the models: 2,000 in total


def example_of(rng: np.random.Generator, layout: VisionLayout, *, touching: bool) -> Example:
    """Text and images of random sizes; pixels are counted up."""
    merge, token = layout.merge_size, layout.image_token_id
    ids: list[int] = []
    grids: list[list[int]] = []
    for _ in range(int(rng.integers(0, 7))):
        if rng.random() < 0.5 and (touching or not ids or ids[-1] != token):
            rows, columns = rng.integers(1, 8, 2).tolist()
            grids.append([1, rows * merge, columns * merge])
            ids += [token] * (rows * columns)
        else:
            ids += rng.integers(70, 90, rng.integers(1, 6)).tolist()
    ids = ids or [70]
    example: Example = {"input_ids": ids, "labels": ids}
    if grids:
        size = int(np.prod(layout.patch_shape))
        patches = int(np.prod(grids, axis=1).sum())
        example["pixel_values"] = np.zeros((patches, size), np.float32)
        example["image_grid_thw"] = np.array(grids)
    return example


def loop_positions(example: Example, layout: VisionLayout) -> Tensor:
    grids = [tuple(grid) for grid in np.asarray(example.get("image_grid_thw", [])).tolist()]
    assert layout.image_token_id is not None
    ids = list(example["input_ids"])
    return mrope_positions(ids, layout.image_token_id, grids, layout.merge_size)


def model_positions(name: str, example: Example) -> Tensor:
    """[3, T], by the model that makes them."""
    model = FAMILIES[name].model().model
    ids = torch.tensor(example["input_ids"])[None]
    types = (ids == FAMILIES[name].image_token_id).int()
    grids = example.get("image_grid_thw")
    given_grids = None if grids is None else torch.as_tensor(grids)
    positions, _ = model.get_rope_index(
        ids,
        mm_token_type_ids=types,
        image_grid_thw=given_grids,
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0]


def check(batch: Batch, expected: list[Tensor]) -> None:
    """Row 0 restarts with every example, rows 1 to 3 are those expected; pads have one value."""
    positions = batch["mrope_position_ids"]
    assert positions.dtype == torch.int64
    assert positions.shape == (len(batch), 4, batch["input_ids"].shape[1])
    assert torch.equal(positions[:, 0], batch["position_ids"])
    is_pad = batch["attention_mask"] == 0
    for row in range(1, 4):
        assert torch.equal(positions[:, row][is_pad], positions[:, 0][is_pad])
    for row, index, start, length in cells_of(batch):
        found = positions[row, :, start : start + length]
        assert found[0].tolist() == list(range(length))
        assert torch.equal(found[1:], expected[index]), (index, found[1:], expected[index])


def collators_of(layout: VisionLayout, examples: list[Example]) -> dict[str, Any]:
    longest = max(len(example["input_ids"]) for example in examples)
    packed = {"max_tokens": 2 * longest + 16, "vision": layout}
    parallel = ParallelLayout(dp=2, tp=4)
    of_padding = {
        "left": PaddedCollator(0, vision=layout, pad_to_multiple_of=4),
        "right": PaddedCollator(0, vision=layout, padding_side="right"),
    }
    if layout.family.not_packed:
        return of_padding
    return of_padding | {
        "packed": packed_collator(0, **packed),
        "aligned": packed_collator(0, **packed, parallel=parallel, fixed_width=True),
    }


# --- against the models --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_positions_are_those_of_the_model(name: str) -> None:
    family, rng = FAMILIES[name], np.random.default_rng(len(name))
    layout = layout_of(family)
    num_images = 0
    for _ in range(NUM_EXAMPLES // 40):
        examples = [example_of(rng, layout, touching=False) for _ in range(40)]
        expected = [model_positions(name, example) for example in examples]
        num_images += sum(len(example.get("image_grid_thw", ())) for example in examples)
        for collate in collators_of(layout, examples).values():
            check(collate(examples), expected)
    assert num_images > NUM_EXAMPLES / 2


# --- against the loop ----------------------------------------------------------------------------


@FUZZ
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from((1, 2, 3)))
def test_positions_are_those_of_the_loop(seed: int, count: int, merge: int) -> None:
    """Also where images touch, for which the models have no answer."""
    layout = VisionLayout("qwen3_vl", image_token_id=9, merge_size=merge, patch_shape=(1, 2, 1))
    rng = np.random.default_rng(seed)
    examples = [example_of(rng, layout, touching=True) for _ in range(count)]
    expected = [loop_positions(example, layout) for example in examples]
    for collate in collators_of(layout, examples).values():
        check(collate(examples), expected)


def test_an_image_of_several_frames_counts_them_in_the_first_row() -> None:
    example = {
        "input_ids": [70, 9, 9, 9, 9, 71],
        "pixel_values": np.zeros((16, 2)),
        "image_grid_thw": [[2, 2, 4]],
    }
    batch = PaddedCollator(0, vision=SMALL)([example])
    assert batch["mrope_position_ids"][0, 1:].tolist() == [
        [0, 1, 1, 2, 2, 3],
        [0, 1, 1, 1, 1, 3],
        [0, 1, 2, 1, 2, 3],
    ]


# --- of rows taken out, joined and moved ---------------------------------------------------------


def _around_text(batch: Batch) -> tuple[Batch, list[int]]:
    text = int((batch["image_grid_thw"].lengths == 0).argmax())
    assert not len(batch["pixel_values"][text])
    image = int(batch["image_grid_thw"].lengths.argmax())
    parts = [batch[i : i + 1] for i in (text, image, text)]
    return Batch.cat(parts, metadata={"num_loss_tokens": 1}), [text, image, text]


CHANGES: dict[str, Callable[[Batch], tuple[Batch, list[int]]]] = {
    "slice": lambda b: (b[1:3], [1, 2]),
    "step": lambda b: (b[::2], list(range(0, len(b), 2))),
    "one row": lambda b: (b[3:4], [3]),
    "select": lambda b: (b.select([3, 0, 0, 2]), [3, 0, 0, 2]),
    "chunk": lambda b: (b.chunk(len(b))[2], [2]),
    "cat": lambda b: (Batch.cat([b[2:], b[:2]]), [*range(2, len(b)), 0, 1]),
    "cat of rows without images": lambda b: _around_text(b),
    "pad_rows": lambda b: (b.pad_rows(multiple_of=len(b) + 1), [*range(len(b)), 0]),
    "pickle": lambda b: (pickle.loads(pickle.dumps(b[2:])), list(range(2, len(b)))),
    "deepcopy": lambda b: (copy.deepcopy(b), list(range(len(b)))),
    "slice of a slice": lambda b: (b[1:][1:][:1], [2]),
}


@pytest.mark.parametrize("kind", ["left", "packed", "aligned"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_positions_of_chosen_rows_are_those_of_the_whole(name: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    examples = [example_of(rng, SMALL, touching=True) for _ in range(6)]
    examples.insert(1, {"input_ids": [70, 71, 72], "labels": [70, 71, 72]})  # row 1 of the padded
    collate = collators_of(SMALL, examples)[kind]
    if kind != "left":
        one_per_row = {"max_sequences_per_row": 1, "balance": None, "fixed_width": True}
        collate = packed_collator(0, max_tokens=400, vision=SMALL, **one_per_row)
    batch = collate(examples)
    assert len(batch) >= 4
    fresh, rows = CHANGES[name](collate(examples))
    assert torch.equal(fresh["mrope_position_ids"], batch["mrope_position_ids"][rows])
    changed, rows = CHANGES[name](batch)  # after the whole was made
    assert torch.equal(changed["mrope_position_ids"], batch["mrope_position_ids"][rows])


# --- devices -------------------------------------------------------------------------------------


def _tensor(field: Any) -> Tensor:
    tensor: Tensor = field if isinstance(field, Tensor) else field.values
    return tensor


@pytest.mark.parametrize("kind", ["left", "right", "packed", "aligned"])
def test_no_field_of_images_waits_for_the_device(kind: str) -> None:
    """Neither of the whole nor of rows; shapes and dtypes are those of the host."""
    rng = np.random.default_rng(3)
    examples = [example_of(rng, SMALL, touching=True) for _ in range(5)]
    batch = collators_of(SMALL, examples)[kind](examples)
    for part in (batch, batch[:1], batch.select([len(batch) - 1])):
        moved = part.to("meta")
        with NoWaiting() as mode:
            fields = {name: moved[name] for name in moved}
            inputs = moved.model_inputs("sdpa", labels=False)
        assert mode.seen > 10
        assert fields["mrope_position_ids"].is_meta
        for name, field in fields.items():
            found, expected = _tensor(field), _tensor(part[name])
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        assert inputs["position_ids"].shape == (4, len(part), part["input_ids"].shape[1])
