"""check_isolation of packed rows with images: what passes, what is caught, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.tiny_models import TRANSFORMERS
from tests.vision import batches
from tests.vision.batches import layout_of
from tests.vision.families import FAMILIES, Example
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.vision import VisionLayout

transformers = pytest.importorskip("transformers")

NAMES = ["qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "idefics3", "gemma3"]
VARLEN = {"text_config": "torch_varlen", "vision_config": "sdpa"}
ALL = pytest.mark.parametrize("name", NAMES)
# images first, in the middle and last, text alone between them, and one example in two rows
PARTS = [
    ["text", (56, 84), "text"],
    ["text"],
    ["text", (28, 28), (84, 56), "text"],
    ["text"],
    ["text", (84, 28), "text"],
    [(56, 56), "text"],
]


def make_examples(name: str, parts: Any = PARTS, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [FAMILIES[name].example(rng, part) for part in parts]


def layout(name: str) -> VisionLayout:
    return layout_of(FAMILIES[name])


def pack(name: str, *, parts: Any = PARTS, rows: int = 2, **options: Any) -> Batch:
    examples = make_examples(name, parts)
    lengths = [-(-len(example["input_ids"]) // 8) * 8 for example in examples]
    max_tokens = max(sum(lengths) // rows + max(lengths) // 2, max(lengths))
    options = {"max_tokens": max_tokens, "vision": layout(name), **options}
    return PackedCollator(FAMILIES[name].processor(), **options)(examples)


def inputs_of(name: str, batch: Batch, attention: str = "sdpa") -> dict[str, Any]:
    """What a training loop passes."""
    return batches.inputs_of(FAMILIES[name], batch, attention)


def check(name: str, inputs: dict[str, Any], attention: Any = "sdpa") -> None:
    check_isolation(FAMILIES[name].model(attention), inputs, vision=layout(name))


# --- what passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
@ALL
def test_packed_rows_pass(name: str, attention: str) -> None:
    batch, how = pack(name), VARLEN if attention == "varlen" else attention
    if (name, attention) == ("gemma3", "varlen"):
        with pytest.raises(ValueError, match=r"attend within themselves.*pass the model, or"):
            check_isolation(FAMILIES[name].model(how), batch)
        return
    assert len(batch) > 1
    assert max(len(row) for row in batch["sub_seq_lengths"].tolist()) > 1
    check_isolation(FAMILIES[name].model(how), batch)
    of_text = "torch_varlen" if attention == "varlen" else attention
    check(name, inputs_of(name, batch, of_text), how)


@ALL
def test_pads_that_align_segments_pass(name: str) -> None:
    batch = pack(name, parallel=ParallelLayout(tp=8))
    lengths = [n for row in batch["sub_seq_lengths"].tolist() for n in row]
    assert any(n % 8 for n in lengths), "no pads in the sample"
    check_isolation(FAMILIES[name].model(), batch)


@pytest.mark.parametrize("side", ["left", "right"])
@ALL
def test_padded_rows_pass(name: str, side: Any) -> None:
    collate = PaddedCollator(FAMILIES[name].processor(), vision=layout(name), padding_side=side)
    check_isolation(FAMILIES[name].model(), collate(make_examples(name)))


# --- what is caught ------------------------------------------------------------------------------


def test_images_of_neighbours_that_touch_are_one_block_without_our_mask() -> None:
    """Up to transformers 5.23 they see each other; later ones lose the second one's block."""
    image = layout("gemma3").image_token_id
    examples = make_examples("gemma3", [["text", (56, 56)], [(56, 56), "text"]])
    for example, is_first in zip(examples, (True, False), strict=True):
        ids = np.asarray(example["input_ids"])
        places = np.flatnonzero(ids == image)
        kept = slice(0, places[-1] + 1) if is_first else slice(places[0], None)
        for key in ("input_ids", "labels", "token_type_ids"):
            example[key] = np.asarray(example[key])[kept]
    collate = PackedCollator(
        FAMILIES["gemma3"].processor(),
        max_tokens=64,
        strategy="sequential",
        vision=layout("gemma3"),
    )
    batch = collate(examples)
    check("gemma3", inputs := inputs_of("gemma3", batch))
    del inputs["attention_mask"]
    joined = r"leaks into.*treats images that touch as one block.*mask=\"block\""
    message = (
        joined if TRANSFORMERS < (5, 24) else r"differs from .*and loses them; .*mask=\"block\""
    )
    with pytest.raises(IsolationError, match=message):
        check("gemma3", inputs)


@pytest.mark.parametrize("parts", [PARTS, [["text"]] * 4], ids=["images", "text"])
def test_text_positions_leak_in_qwen2_5_vl(parts: Any) -> None:
    inputs = inputs_of("qwen2_5_vl", pack("qwen2_5_vl", parts=parts))
    inputs["position_ids"] = inputs["position_ids"][0]
    with pytest.raises(IsolationError, match=r"leaks into.*separates packed examples by \[4, "):
        check("qwen2_5_vl", inputs)
    if parts is not PARTS:
        with pytest.raises(IsolationError, match=r"separates packed examples by \[4, "):
            check_isolation(FAMILIES["qwen2_5_vl"].model(), inputs)  # without vision


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("after", [0, 1], ids=["image", "text after it"])
def test_one_wrong_position_is_found(after: int, attention: str) -> None:
    how = VARLEN if attention == "varlen" else attention
    of_text = "torch_varlen" if attention == "varlen" else attention
    inputs = inputs_of("qwen2_5_vl", pack("qwen2_5_vl"), of_text)
    is_image = inputs["input_ids"] == FAMILIES["qwen2_5_vl"].image_token_id
    row, column = torch.nonzero(is_image)[-1].tolist()
    inputs["position_ids"] = inputs["position_ids"].clone()
    inputs["position_ids"][3, row, column + after] += 7
    with pytest.raises(IsolationError, match=r"its position_ids differ from those alone"):
        check("qwen2_5_vl", inputs, how)


@ALL
def test_a_model_that_ignores_images_shows_nothing(name: str) -> None:
    def gray(module: Any, args: Any, kwargs: Any) -> Any:
        if "pixel_values" in kwargs:
            kwargs["pixel_values"] = torch.full_like(kwargs["pixel_values"], 0.3)
        return args, kwargs

    model = FAMILIES[name].model()
    hook = model.register_forward_pre_hook(gray, with_kwargs=True)
    try:
        with pytest.raises(
            IsolationError,
            match=r"changing the pixels of its first image.* does not move.*reads pixel_values",
        ):
            check_isolation(model, pack(name))
    finally:
        hook.remove()


@ALL
def test_a_leak_of_pixels_alone_is_found(name: str) -> None:
    """Text leaks nothing; the first example's image reaches the last token of its row."""

    def leak(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        pixels = kwargs["pixel_values"]
        first = pixels[0, 0] if name == "idefics3" else pixels[0]
        output.logits[0, -1] += first.flatten()[:7].mean()

    model, batch = FAMILIES[name].model(), pack(name)
    first = batch.row_metadata["example_indices"].tolist()[0][0]
    assert len(PARTS[first]) > 1, "no image at the beginning of row 0"
    hook = model.register_forward_hook(leak, with_kwargs=True)
    try:
        with pytest.raises(
            IsolationError,
            match=r"row 0 segment 0 leaks into row 0 segment \d .*pixels of its first image.*1 of",
        ):
            check_isolation(model, batch)
    finally:
        hook.remove()


# --- inputs that do not fit ----------------------------------------------------------------------


def test_images_without_vision_are_refused() -> None:
    inputs = inputs_of("internvl", pack("internvl"))
    with pytest.raises(ValueError, match=r"pixel_values, but not the segment.*collator\.vision"):
        check_isolation(FAMILIES["internvl"].model(), inputs)
    processor: Any = FAMILIES["internvl"].processor()
    with pytest.raises(TypeError, match=r"vision must be a VisionLayout, got Intern.*collator\.vi"):
        check_isolation(FAMILIES["internvl"].model(), inputs, vision=processor)


def test_images_that_do_not_fit_the_placeholders_are_refused() -> None:
    inputs = inputs_of("qwen3_vl", pack("qwen3_vl"))
    grids = inputs["image_grid_thw"]
    size = int(grids[-1].prod())
    fewer = {"image_grid_thw": grids[:-1], "pixel_values": inputs["pixel_values"][:-size]}
    with pytest.raises(ValueError, match=r"\d+ image placeholders \(token 7\), but the images ne"):
        check("qwen3_vl", inputs | fewer)
    without = {k: v for k, v in inputs.items() if k not in fewer}
    with pytest.raises(ValueError, match=r"placeholders .* but the images need 0"):
        check("qwen3_vl", without)
    with pytest.raises(ValueError, match=r"pixel_values has \d+ patch entries, but the images des"):
        check("qwen3_vl", inputs | {"pixel_values": inputs["pixel_values"][1:]})


# --- families that are not packed ----------------------------------------------------------------


class Unused(nn.Module):
    """Refused before it is run."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("PaliGemmaConfig", r"paligemma models with images.*prefixes of all examples.*PaddedColl"),
        ("MllamaConfig", r"mllama models with images.*attends to every image of its row"),
        (
            "Qwen3_5Config",
            r"qwen3_5 models need seq_idx and cu_seq_lens_q.*batch.model_inputs\(mod",
        ),
    ],
)
def test_families_that_are_not_packed_are_refused(config: str, message: str) -> None:
    inputs = {
        "input_ids": torch.ones(1, 6, dtype=torch.int64),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "pixel_values": torch.ones(1, 3, 14, 14),
    }
    with pytest.raises(IsolationError, match=message):
        check_isolation(Unused(getattr(transformers, config)()), inputs)


def test_an_unknown_family_is_refused() -> None:
    inputs = inputs_of("internvl", pack("internvl"))
    model = Unused(SimpleNamespace(model_type="mine"))
    with pytest.raises(IsolationError, match=r"of other models with images.*not in the tab"):
        check_isolation(model, inputs, vision=VisionLayout("other", image_token_id=5))
