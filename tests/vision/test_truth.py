"""The truth itself: the models are sensitive, and alone is what the models' own batches give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.vision.alone import alone, alone_gradients, mrope_positions, placeholders_touch
from tests.vision.families import FAMILIES, MROPE, Example, Part, TinyFamily

MIXED: list[list[Part]] = [
    ["text", (56, 84), "text"],
    ["text"],
    [(28, 56), "text", (84, 140), "text"],
    ["text", (112, 56), "text"],
]
PARTS = {
    **dict.fromkeys(FAMILIES, MIXED),
    "paligemma": [MIXED[0], *MIXED[2:]],  # its processor takes no text-only example
    # Tokens before the first image have an empty cross-attention row, so they attend to the
    # padding of the images: such a batch is not equal to alone, nor is one with text-only rows.
    "mllama": [[(56, 84), "text"], MIXED[2], [(112, 56), "text"]],
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> TinyFamily:
    return FAMILIES[request.param]


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def mixed_examples(family: TinyFamily) -> list[Example]:
    return [family.example(rng_of(i), parts) for i, parts in enumerate(PARTS[family.name])]


def padded_batch(family: TinyFamily) -> dict[str, Tensor]:
    """The same examples as the family's own processor batches them, padded on the right."""
    found = [family.text_and_images(rng_of(i), parts) for i, parts in enumerate(PARTS[family.name])]
    fields = family.processor()(
        text=[text for text, _, _ in found],
        images=[images for _, _, images in found],
        padding=True,
        padding_side="right",
        return_tensors="pt",
        **({"suffix": [suffix for _, suffix, _ in found]} if family.suffix else {}),
    )
    return {name: value for name, value in fields.items() if name != "labels"}


def logits_alone(family: TinyFamily, example: Example) -> Tensor:
    return alone(family, family.model(), example)[0]


# --- what the processors' own batches give ---------------------------------------------------


def test_a_right_padded_batch_equals_alone(family: TinyFamily) -> None:
    batch = padded_batch(family)
    with torch.no_grad():
        found = family.model()(**batch, use_cache=False).logits
    lengths = {len(example["input_ids"]) for example in mixed_examples(family)}
    assert len(lengths) > 1, "nothing is padded"
    for row, example in enumerate(mixed_examples(family)):
        length = len(example["input_ids"])
        assert batch["input_ids"][row, :length].tolist() == example["input_ids"]
        assert not batch["attention_mask"][row, length:].any()
        expected = logits_alone(family, example)
        assert (found[row, :length] - expected).abs().max() < 1e-4


def test_gradients_of_a_right_padded_batch_equal_alone(family: TinyFamily) -> None:
    examples, model, batch = mixed_examples(family), family.model(), padded_batch(family)
    labels = torch.full(batch["input_ids"].shape, -100)
    for row, example in enumerate(examples):
        labels[row, : len(example["labels"])] = torch.tensor(example["labels"])
    logits = model(**batch, use_cache=False).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected = alone_gradients(family, examples)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    assert {n for n, g in zip(names, found, strict=True) if g is not None} == set(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0.1
    for parameter_name, gradient in zip(names, found, strict=True):
        if gradient is not None:
            assert (gradient - expected[parameter_name]).abs().max() < 1e-5 * max(1, largest)
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "internvl", "gemma3"])
def test_flat_vision_fields_of_a_batch_are_those_of_the_examples(name: str) -> None:
    family = FAMILIES[name]
    batch, examples = padded_batch(family), mixed_examples(family)
    with_images = [example for example in examples if "pixel_values" in example]
    assert len(with_images) == 3
    for field in ("pixel_values", "image_grid_thw"):
        if field in batch:
            joined = np.concatenate([example[field] for example in with_images])
            assert np.array_equal(batch[field].numpy(), joined)


# --- the models are sensitive ----------------------------------------------------------------


def test_one_pixel_moves_the_logits(family: TinyFamily) -> None:
    example = family.example(rng_of(0), ["text", (56, 84), "text"])
    pixels = example["pixel_values"].copy()
    pixels.reshape(-1)[2000] += 4  # inside the first tile, where there are tiles
    moved = logits_alone(family, {**example, "pixel_values": pixels})
    assert (moved - logits_alone(family, example)).abs().max() > 0.05


def test_two_images_swapped_move_the_logits(family: TinyFamily) -> None:
    example = family.example(rng_of(0), ["text", (56, 84), "text", (56, 84), "text"])
    text, suffix, images = family.text_and_images(
        rng_of(0), ["text", (56, 84), "text", (56, 84), "text"]
    )
    more = {} if suffix is None else {"suffix": [suffix]}
    fields = family.processor()(text=[text], images=[images[::-1]], return_tensors="np", **more)
    assert fields["input_ids"][0].tolist() == example["input_ids"]
    pixels = fields["pixel_values"]
    pixels = pixels[0] if "pixel_values" in family.per_example else pixels
    assert pixels.shape == example["pixel_values"].shape
    swapped = logits_alone(family, {**example, "pixel_values": pixels})
    assert (swapped - logits_alone(family, example))[-1].abs().max() > 0.1


def test_an_image_left_out_moves_the_logits(family: TinyFamily) -> None:
    both = family.example(rng_of(0), ["ab", (56, 84), "cd", (56, 84), "ef"])
    one = family.example(rng_of(0), ["ab", (56, 84), "cdef"])
    assert both["input_ids"][-2:] == one["input_ids"][-2:]
    difference = logits_alone(family, both)[-1] - logits_alone(family, one)[-1]
    assert difference.abs().max() > 0.1


def test_the_first_token_moves_the_last_logits(family: TinyFamily) -> None:
    one = family.example(rng_of(0), ["ab cde", (56, 84), "fghi"])
    other = family.example(rng_of(0), ["zb cde", (56, 84), "fghi"])
    difference = logits_alone(family, one)[-1] - logits_alone(family, other)[-1]
    assert difference.abs().max() > 0.5


@pytest.mark.parametrize("name", MROPE)
def test_plain_positions_move_the_logits(name: str) -> None:
    family = FAMILIES[name]
    example = family.example(rng_of(0), ["text", (56, 112), "text"])
    inputs = family.model_inputs(example)
    plain = torch.arange(len(example["input_ids"])).expand(3, 1, -1)
    with torch.no_grad():
        found = family.model()(**inputs, position_ids=plain, use_cache=False).logits[0]
    assert (found - logits_alone(family, example)).abs().max() > 0.1


# --- M-RoPE positions ------------------------------------------------------------------------


def random_mrope_case(
    rng: np.random.Generator, image: int, merge: int, *, touch: bool = False
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Text and images by turns; with ``touch`` two images have no token between them."""
    num_images = int(rng.integers(2 if touch else 0, 5))
    ids, grids = [30] * int(rng.integers(0 if num_images else 1, 5)), []
    for i in range(num_images):
        if i and not touch:
            ids += [31] * int(rng.integers(1, 5))
        frames, height, width = (int(n) for n in rng.integers(1, (3, 8, 8)))
        grids.append((frames, height * merge, width * merge))
        ids += [image] * (frames * height * width)
    return ids + [32] * int(rng.integers(0, 5)), grids


def rope_index(family: TinyFamily, ids: list[int], grids: list[tuple[int, int, int]]) -> Tensor:
    input_ids = torch.tensor([ids])
    found, _ = family.model().model.get_rope_index(
        input_ids,
        mm_token_type_ids=(input_ids == family.image_token_id).int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    return found[:, 0]


@pytest.mark.parametrize("name", MROPE)
def test_the_loop_gives_the_positions_of_the_model(name: str) -> None:
    family, rng = FAMILIES[name], rng_of(1)
    merge = family.spatial_merge_size
    assert merge == 2
    several = 0
    for _ in range(250):
        ids, grids = random_mrope_case(rng, family.image_token_id, merge)
        found = mrope_positions(ids, family.image_token_id, grids, merge)
        assert torch.equal(found, rope_index(family, ids, grids)), (ids, grids)
        several += len(grids) > 1
    assert several > 50


def test_positions_of_touching_images_written_by_hand() -> None:
    ids, image = [30, 9, 9, 9, 9, 9, 9, 9, 9, 31], 9
    grids = [(1, 4, 4), (1, 2, 6), (1, 2, 2)]  # 2 x 2, 1 x 3 and 1 x 1 placeholders
    expected = [
        [0, 1, 1, 1, 1, 3, 3, 3, 6, 7],
        [0, 1, 1, 2, 2, 3, 3, 3, 6, 7],
        [0, 1, 2, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert mrope_positions(ids, image, grids, 2).tolist() == expected


@pytest.mark.parametrize("name", MROPE)
def test_the_model_makes_no_positions_where_images_touch(name: str) -> None:
    family, rng = FAMILIES[name], rng_of(2)
    raised = 0
    for _ in range(20):
        ids, grids = random_mrope_case(rng, family.image_token_id, 2, touch=True)
        try:
            rope_index(family, ids, grids)
        except (RuntimeError, StopIteration, ValueError, IndexError):
            raised += 1
    assert raised == 20


@pytest.mark.parametrize("name", MROPE)
def test_own_positions_give_the_result_of_the_model(name: str) -> None:
    family = FAMILIES[name]
    parts: list[Part] = [(28, 56), (84, 56), "text", (56, 140)]
    example = family.example(rng_of(3), parts, wrapped=True)
    assert not placeholders_touch(family, example)
    grids = [tuple(grid) for grid in example["image_grid_thw"]]
    positions = mrope_positions(example["input_ids"], family.image_token_id, grids, 2)
    with torch.no_grad():
        found = family.model()(
            **family.model_inputs(example), position_ids=positions[:, None], use_cache=False
        ).logits[0]
    assert torch.equal(found, logits_alone(family, example))
    touching = family.example(rng_of(3), parts)
    assert placeholders_touch(family, touching)
    assert logits_alone(family, touching).shape[0] == len(touching["input_ids"])


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([9, 9, 30], [(1, 4, 4)], "text inside image 0, 2 placeholders before its end"),
        ([30, 9], [(1, 2, 4)], "image 0 ends 1 placeholders early"),
        ([30, 9], [(1, 2, 2), (1, 2, 2)], "placeholders of 1 images, 2 grids"),
    ],
)
def test_the_loop_refuses_what_does_not_fit(ids: Any, grids: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        mrope_positions(ids, 9, grids, 2)


# --- examples, models and processors ---------------------------------------------------------

GRID = {"pixel_values", "image_grid_thw"}
TILES_PER_EXAMPLE = {"pixel_values", "pixel_attention_mask"}
VISION_FIELDS = {
    **dict.fromkeys(MROPE, GRID),
    **{name: {"pixel_values"} for name in ("internvl", "gemma3", "paligemma")},
    **dict.fromkeys(("idefics3", "smolvlm"), TILES_PER_EXAMPLE),
    "llava_onevision": {"pixel_values", "image_sizes", "batch_num_images"},
    "llava_next": {"pixel_values", "image_sizes"},
    "mllama": {"pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"},
}
TOKEN_TYPES = {
    **{name: {"mm_token_type_ids"} for name in MROPE},
    **{name: {"token_type_ids"} for name in ("gemma3", "paligemma")},
}


def test_an_example_has_the_fields_of_its_processor(family: TinyFamily) -> None:
    text = {"input_ids", "labels"} | TOKEN_TYPES.get(family.name, set())
    example = family.example(rng_of(0), ["text", (28, 56), (56, 28), "text"])
    assert example.keys() == text | VISION_FIELDS[family.name]
    assert {len(example[name]) for name in text} == {len(example["input_ids"])}
    assert all(isinstance(example[name], np.ndarray) for name in VISION_FIELDS[family.name])
    assert all(isinstance(example[name], list) for name in text)
    if family.name != "paligemma":
        assert family.example(rng_of(0), ["text"]).keys() == text


@pytest.mark.parametrize(
    "parts",
    [
        ["text", (28, 56), "text"],
        [(28, 56), (56, 28)],
        [(28, 56), "text", (28, 28)],
        ["text", (140, 28), (28, 28), (28, 28), "text"],
    ],
)
def test_labels_leave_out_prompt_first_token_and_images(
    family: TinyFamily, parts: list[Part]
) -> None:
    num_trained = 0
    for seed in range(5):
        example = family.example(rng_of(seed), parts)
        ids, labels = example["input_ids"], example["labels"]
        trained = [i for i, label in enumerate(labels) if label != -100]
        assert all(labels[i] == ids[i] != family.image_token_id for i in trained)
        assert 0 not in trained
        text = [i for i in range(1, len(ids)) if ids[i] != family.image_token_id]
        assert trained == [i for i in text if trained and i >= trained[0]]
        logits, loss_sum, num_loss_tokens = alone(family, family.model(), example)
        assert (logits.shape[0], num_loss_tokens) == (len(ids), len(trained))
        expected = sum(-functional.log_softmax(logits[i - 1], -1)[ids[i]] for i in trained)
        assert float(loss_sum) == pytest.approx(float(expected), rel=1e-5)
        num_trained += len(trained)
    if parts[-1] == "text":
        assert num_trained > 0


def test_images_stand_in_the_order_and_size_of_the_parts(family: TinyFamily) -> None:
    parts: list[Part] = [(28, 56), "ab", (56, 112), (84, 56), "cd"]
    text, suffix, images = family.text_and_images(rng_of(0), parts)
    assert [(image.height, image.width) for image in images] == [(28, 56), (56, 112), (84, 56)]
    one = family.placeholder
    assert text + (suffix or "") == f"{one}ab{one}{one}cd"
    example = family.example(rng_of(0), parts)
    if "image_sizes" in example:
        assert example["image_sizes"].tolist() == [[28, 56], [56, 112], [84, 56]]
    if family.name in ("qwen2_vl", "qwen2_5_vl"):
        assert example["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 8], [1, 6, 4]]


def test_examples_repeat_with_the_seed(family: TinyFamily) -> None:
    parts: list[Part] = ["text", (28, 56), "text"]
    one, same, other = (family.example(rng_of(seed), parts) for seed in (0, 0, 1))
    assert one.keys() == same.keys()
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert one["input_ids"] != other["input_ids"]
    assert not np.array_equal(one["pixel_values"], other["pixel_values"])


def test_token_ids_of_the_config_are_those_of_the_tokenizer(family: TinyFamily) -> None:
    config, tokenizer = family.model().config, family.processor().tokenizer
    tokens = {
        "image_token_id": family.image_token,
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "video_token_id": getattr(tokenizer, "video_token", None),
    }
    present = [name for name in tokens if getattr(config, name, None) is not None]
    assert "image_token_id" in present
    for name in present:
        assert getattr(config, name) == tokenizer.convert_tokens_to_ids(tokens[name]), name
    assert config.get_text_config().pad_token_id == tokenizer.pad_token_id == 0


def test_attention_changes_neither_weights_nor_logits(family: TinyFamily) -> None:
    example = family.example(rng_of(0), ["text", (56, 84), "text"])
    expected = logits_alone(family, example)
    assert 5 < expected.abs().max() < 15
    mixed = {"text_config": "eager", "vision_config": "sdpa"}
    for attention in ("eager", mixed):
        model = family.model(attention)
        assert model.config.get_text_config()._attn_implementation == "eager"
        found = alone(family, model, example)[0]
        assert (found - expected).abs().max() < 1e-4
    assert family.model(mixed).config.vision_config._attn_implementation == "sdpa"
    assert family.model("sdpa") is family.model()


def test_the_chat_template_writes_one_placeholder_per_image(family: TinyFamily) -> None:
    processor = family.processor()
    image = {"type": "image"}
    user = {"role": "user", "content": [image, {"type": "text", "text": "and"}, image]}
    turns = [user, {"role": "assistant", "content": "yes"}]
    text = processor.apply_chat_template(turns, tokenize=False)
    start, end = family.wrap
    one = start + family.placeholder + end
    expected = f"user\n{one}and{one}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert text == "<|im_start|>" + expected
