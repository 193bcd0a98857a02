"""What image batches must hold, one token and one image at a time: slow, and from the rules alone.

An example is drawn image by image, so that the oracle knows what belongs to each image and never
asks the package. Every pixel of a batch has a value of its own, so a wrong one says where it is
from. Legend: R rows, W width in cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import settings

from tests import oracle
from tests.strategies import FUZZ
from tests.vision.batches import mrope_positions
from torch_collate_kit.vision import VisionLayout

TOKEN = 9  # the placeholder
# Every family draws its own: fewer of each are enough.
FEWER = settings(FUZZ, max_examples=settings().max_examples // 3)
_TILED = {"image_token_id": TOKEN, "tile_size": 2}
_LLAVA = {
    **_TILED,
    **{"tile_tokens": 4, "tile_side": 2, "pinpoints": ((2, 2), (2, 4), (4, 2), (4, 4))},
}
LAYOUTS = {
    "qwen2_vl": VisionLayout("qwen2_vl", TOKEN, merge_size=2, patch_shape=(3, 2, 1)),
    "glm4v": VisionLayout("glm4v", TOKEN, merge_size=1, patch_shape=(1, 1, 2)),
    "internvl": VisionLayout("internvl", **_TILED, tile_tokens=2),
    "idefics3": VisionLayout("idefics3", **_TILED, tile_tokens=2),
    "gemma3": VisionLayout("gemma3", **_TILED, tile_tokens=3),
    "llava_next": VisionLayout("llava_next", **_LLAVA),
    "llava_onevision": VisionLayout("llava_onevision", **_LLAVA, max_tiles=9),
}
# Placeholders and tiles of an image of one of the pinpoints' sizes: the whole in one tile of
# 2 x 2 patches, its tiles, and a newline per row of their patches.
_LLAVA_SIZES = {(2, 2): (10, 2), (2, 4): (14, 3), (4, 2): (16, 3), (4, 4): (24, 5)}
_PER_TOKEN = ("loss_mask", "labels", "assistant_masks", "completion_mask")


@dataclass
class DrawnExample:
    """An example as it is given, and its images: how many placeholders, and their entries."""

    given: dict[str, Any]
    plain: dict[str, Any]
    """Lists for the oracle of texts, placeholders not trained."""
    images: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return list(self.plain["input_ids"])


def draw_example(
    rng: np.random.Generator,
    layout: VisionLayout,
    index: int,
    target: str = "labels",
    *,
    max_images: int = 3,
) -> DrawnExample:
    """Text and up to ``max_images`` images, also next to each other, first, last or alone."""
    count = int(rng.integers(0, max_images + 1))
    images = [_image(rng, layout, 100 * index + k, is_cut=count == 1) for k in range(count)]
    ids: list[int] = []
    for image in images:
        ids += _text(rng, index, len(ids)) if rng.random() < 0.6 else []
        ids += [TOKEN] * image["tokens"]
    if not ids or rng.random() < 0.7:
        ids += [100 * (index + 1), *_text(rng, index, len(ids))]
    plain = {"input_ids": ids, **_target(rng, ids, target)}
    given = {**plain, **(_fields(rng, layout, images) if images else _no_fields(rng, layout))}
    return DrawnExample(given, without_image_targets(plain), images)


def without_image_targets(example: Mapping[str, Any]) -> dict[str, Any]:
    """The same example with nothing to train at placeholders."""
    ids, changed = example["input_ids"], dict(example)
    names = [name for name in _PER_TOKEN if name in example]
    if not names:
        return changed | {"loss_mask": [int(token != TOKEN) for token in ids]}
    for name in names:
        values = list(example[name])
        for place in range(len(values)):
            if ids[len(ids) - len(values) + place] == TOKEN:
                values[place] = oracle.IGNORE if name == "labels" else 0
        changed[name] = values
    return changed


def add_images(
    batch: dict[str, Any],
    examples: Sequence[DrawnExample],
    layout: VisionLayout,
    rows: Sequence[Sequence[tuple[int, int, int]]],
    *,
    padding_side: str = "left",
) -> dict[str, Any]:
    """The batch of a text oracle with the fields of images.

    ``rows`` are the pieces of each row: example, first token, and number of tokens.
    """
    first_cells = []
    for row, pieces in enumerate(rows):
        if "cu_seq_lens" in batch:
            first_cells.append(batch["cu_seq_lens"][row][: len(pieces)])
        else:
            pads = batch["input_ids"].shape[1] - pieces[0][2]
            first_cells.append([pads if padding_side == "left" else 0])
    added: dict[str, Any] = {name: [] for name in layout.family.fields}
    for pieces in rows:
        kept = [(i, _kept(examples[i], start, length)) for i, start, length in pieces]
        for name in added:
            entries: list[Any] = []
            for i, number in kept:
                if name == "batch_num_images":
                    entries += [number] if number else []
                    continue
                for image in examples[i].images[:number]:
                    entries += _as_stored(image[name], layout).tolist()
            added[name].append(entries)
    if layout.family.positions == "mrope":
        added["mrope_position_ids"] = _positions(batch, examples, layout, rows, first_cells)
    if layout.family.token_types:
        added[layout.family.token_types] = _token_types(batch, examples, rows, first_cells)
    return batch | added


def smallest_example(layout: VisionLayout) -> DrawnExample:
    """The image of a row that needs one, so that every rank runs the vision tower: all 0 or 1."""
    name = layout.family_name
    tokens, tiles = {"llava_next": (10, 2), "llava_onevision": (10, 2)}.get(
        name, (layout.tile_tokens, 1)
    )
    image: dict[str, Any] = {"pixel_values": np.ones((tiles, 3, 2, 2))}
    if name in ("qwen2_vl", "glm4v"):
        side, tokens = layout.merge_size, 1
        image = {"pixel_values": np.zeros((side * side, int(np.prod(layout.patch_shape))))}
        image["image_grid_thw"] = np.array([[1, side, side]])
    if "image_sizes" in layout.fields:
        image["image_sizes"] = np.array([[2, 2]])
    if "pixel_attention_mask" in layout.fields:
        image["pixel_attention_mask"] = np.ones((1, 2, 2), np.int64)
    plain = {"input_ids": [TOKEN] * tokens, "loss_mask": [0] * tokens, "num_actions": tokens}
    return DrawnExample({}, plain, [{"tokens": tokens, **image}])


def packed_with_images(
    examples: Sequence[DrawnExample], plan: Any, layout: VisionLayout, **options: Any
) -> dict[str, Any]:
    """What `oracle.packed_batch` says of these rows, with images, and smallest ones where needed.

    A smallest image is a segment at the end of its row, and no sub-sequence.
    """
    dummy = smallest_example(layout)
    rows = [
        pieces + [(len(examples), 0, len(dummy.ids))] * bool(needed)
        for pieces, needed in zip(oracle.rows_of(plan), plan.needs_dummy_image, strict=True)
    ]
    with_dummy = SimpleNamespace(
        example_indices=[i for row in rows for i, _, _ in row],
        starts=[start for row in rows for _, start, _ in row],
        lengths=[length for row in rows for _, _, length in row],
        row_offsets=np.cumsum([0, *map(len, rows)]),
        dropped=plan.dropped,
        cut=plan.cut,
    )
    last = {name: dummy.plain[name] for name in dummy.plain if name in examples[0].plain}
    if "labels" in examples[0].plain:
        last["labels"] = [oracle.IGNORE] * len(dummy.ids)
    for name in ("assistant_masks", "completion_mask"):
        if name in examples[0].plain:
            last[name] = [0] * len(dummy.ids)
    plain = [*(example.plain for example in examples), last]
    batch = oracle.packed_batch(plain, with_dummy, pad_token_id=0, **options)
    batch = add_images(batch, [*examples, dummy], layout, rows)
    metadata = batch["metadata"]
    for row in np.flatnonzero(plan.needs_dummy_image).tolist():
        metadata["step_num_tokens"] -= batch["sub_seq_lengths"][row].pop()
        for name in ("example_indices", "example_starts", "num_actions", "num_trained"):
            metadata[name][row].pop()
    metadata["num_examples"] -= 1
    metadata["num_dummy_rows"] = sum(not pieces for pieces in oracle.rows_of(plan))
    metadata["num_dummy_images"] = int(sum(plan.needs_dummy_image))
    return batch


def patches_of(examples: Sequence[DrawnExample]) -> list[list[int]]:
    """What a plan is told: patches of each image, or tiles."""
    return [[len(image["pixel_values"]) for image in example.images] for example in examples]


def _kept(example: DrawnExample, start: int, length: int) -> int:
    """How many images lie in these tokens; none is cut through."""
    number, seen, placeholders = 0, 0, example.ids[start : start + length].count(TOKEN)
    for image in example.images:
        seen += image["tokens"]
        number += seen <= placeholders
    assert start == 0 or not example.images
    assert sum(image["tokens"] for image in example.images[:number]) == placeholders
    return number


def _positions(batch: Any, examples: Any, layout: Any, rows: Any, first_cells: Any) -> torch.Tensor:
    found = batch["position_ids"][:, None].repeat(1, 4, 1)
    for row, (pieces, firsts) in enumerate(zip(rows, first_cells, strict=True)):
        for (i, start, length), first in zip(pieces, firsts, strict=True):
            ids = examples[i].ids[start : start + length]
            images = examples[i].images[: _kept(examples[i], start, length)]
            grids = [tuple(image["image_grid_thw"][0].tolist()) for image in images]
            positions = mrope_positions(ids, TOKEN, grids, layout.merge_size)
            found[row, 1:, first : first + length] = positions
    return found


def _token_types(batch: Any, examples: Any, rows: Any, first_cells: Any) -> torch.Tensor:
    found = torch.zeros_like(batch["input_ids"])
    for row, (pieces, firsts) in enumerate(zip(rows, first_cells, strict=True)):
        for (i, start, length), first in zip(pieces, firsts, strict=True):
            for place in range(length):
                found[row, first + place] = int(examples[i].ids[start + place] == TOKEN)
    return found


def _as_stored(entries: np.ndarray, layout: VisionLayout) -> torch.Tensor:
    if entries.dtype.kind != "f":
        return torch.from_numpy(entries).long()
    return torch.from_numpy(entries).to(getattr(torch, layout.pixel_dtype))


def _text(rng: np.random.Generator, index: int, length: int) -> list[int]:
    return [100 * (index + 1) + (length + t) % 90 for t in range(int(rng.integers(1, 6)))]


def _image(
    rng: np.random.Generator, layout: VisionLayout, number: int, *, is_cut: bool
) -> dict[str, Any]:
    """Its placeholders, and what each field has of it."""
    if layout.family_name in ("qwen2_vl", "glm4v"):
        rows, columns = rng.integers(1, 4, 2).tolist()
        merge = layout.merge_size
        channels, frames, size = layout.patch_shape
        patches = rows * columns * merge**2
        pixels = _pixels(number, (patches, channels, 1, size)).repeat(frames, axis=2)
        grid = np.array([[1, rows * merge, columns * merge]])
        return {
            "tokens": rows * columns,
            "pixel_values": pixels.reshape(patches, -1),
            "image_grid_thw": grid,
        }
    tokens, tiles, more = layout.tile_tokens, 1, {}
    if "image_sizes" in layout.family.fields:
        height, width = list(_LLAVA_SIZES)[rng.integers(4)]
        more["image_sizes"] = np.array([[height, width]])
        tokens, tiles = _LLAVA_SIZES[height, width]
        if layout.family_name == "llava_onevision" and not is_cut:
            tokens, tiles = layout.tile_tokens + 1, 1
    elif layout.family_name != "gemma3":  # tiles are told apart, images are not
        pass
    if "pixel_attention_mask" in layout.family.fields:
        mask = np.ones((1, 2, 2), dtype=np.int64)
        mask[0, 1] = rng.integers(0, 2)
        more["pixel_attention_mask"] = mask
    return {"tokens": tokens, "pixel_values": _pixels(number, (tiles, 3, 2, 2)), **more}


def _pixels(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values of their own, exact in float32."""
    return (number * 64 + np.arange(np.prod(shape)).reshape(shape)).astype(np.float64) / 8


def _fields(
    rng: np.random.Generator, layout: VisionLayout, images: list[dict[str, Any]]
) -> dict[str, Any]:
    """What a processor returns, in one of the containers that it may come in."""
    names = [name for name in layout.family.fields if name != "batch_num_images"]
    fields = {name: np.concatenate([image[name] for image in images]) for name in names}
    if "batch_num_images" in layout.family.fields:
        fields["batch_num_images"] = np.array([len(images)])
    if "image_sizes" in fields and rng.random() < 0.5:  # padded to the most tiles
        most = max(len(image["pixel_values"]) for image in images) + int(rng.integers(0, 2))
        padded = np.full((len(images), most, 3, 2, 2), -1.0)
        for i, image in enumerate(images):
            padded[i, : len(image["pixel_values"])] = image["pixel_values"]
        fields["pixel_values"] = padded
    elif "pixel_attention_mask" in fields and rng.random() < 0.5:  # of a batch of one
        added = int(rng.integers(0, 3))
        fields = {
            name: np.pad(of, [(0, added)] + [(0, 0)] * (of.ndim - 1))[None]
            for name, of in fields.items()
        }
    return {name: _contained(rng, array) for name, array in fields.items()}


def _contained(rng: np.random.Generator, array: np.ndarray) -> Any:
    kind = int(rng.integers(0, 7))
    if kind == 0:
        return array.tolist()
    if kind == 1:
        return torch.from_numpy(array.copy())
    if kind == 2:
        return torch.from_numpy(array.copy()).to(
            torch.float32 if array.dtype.kind == "f" else torch.int32
        )
    if kind == 3:
        array = array.copy()
        array.flags.writeable = False
        return array
    if kind == 4:
        return np.ascontiguousarray(array[::-1])[::-1]
    if kind == 5:
        return array.astype(array.dtype.newbyteorder(">"))
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int32)


def _no_fields(rng: np.random.Generator, layout: VisionLayout) -> dict[str, Any]:
    """Nothing, or what stands for it."""
    kind = int(rng.integers(0, 3))
    if kind == 0:
        return {}
    return {name: None if kind == 1 else [] for name in layout.family.fields}


def _target(rng: np.random.Generator, ids: list[int], form: str) -> dict[str, Any]:
    length = len(ids)
    bits = rng.integers(0, 2, length).tolist() if rng.random() < 0.7 else [1] * length
    if form == "none":
        return {}
    if form == "labels":
        pairs = zip(ids, bits, strict=True)
        return {"labels": [token if kept else oracle.IGNORE for token, kept in pairs]}
    if form == "num_actions":
        number = int(rng.integers(0, length + 1))
        return {"loss_mask": bits[length - number :], "num_actions": number}
    if form == "weights":
        return {"loss_mask": [bit * 0.5 for bit in bits]}
    return {form: bits}
