"""Examples with images that the benchmarks run on: drawn images, a processor built by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from torch_collate_kit.vision import VisionLayout

__all__ = [
    "VOCABULARY",
    "image_mix",
    "patch_counts",
    "processed",
    "qwen3_layout",
    "qwen3_processor",
    "records",
]

PATCH, MERGE = 16, 2
_TOKENS = ("<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_TOKENS += ("<|image_pad|>", "<|video_pad|>")
VOCABULARY = len(_TOKENS) + 256
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ("what", "does", "the", "picture", "show", "a", "wall", "of", "bricks", "open", "doors")


class _Processor(Qwen3VLProcessor):
    """Without a video processor, which would need torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def qwen3_processor(longest_side: int) -> Any:
    """That of Qwen3-VL: patches of 16 pixels, one token per byte of text, no download.

    Larger images are resized to ``longest_side`` squared pixels.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate([*_TOKENS, *alphabet])}
    of_bytes = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.add_special_tokens([AddedToken(name, normalized=False) for name in _TOKENS])
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, pad_token="<pad>", extra_special_tokens=names
    )
    limits = {"shortest_edge": 64**2, "longest_edge": longest_side**2}
    images = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=limits)
    return _Processor(image_processor=images, tokenizer=tokenizer, chat_template=_TEMPLATE)


def qwen3_layout(processor: Any, pixel_dtype: str = "float32") -> VisionLayout:
    """That of Qwen3-VL; other models have its processor, too."""
    return VisionLayout.of(processor, Qwen3VLConfig(), pixel_dtype=pixel_dtype)


def _drawn(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    noise = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    canvas = ImageDraw.Draw(image)
    for _ in range(4):
        left, right = sorted(rng.integers(0, width, 2).tolist())
        top, bottom = sorted(rng.integers(0, height, 2).tolist())
        canvas.rectangle((left, top, right, bottom), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image


def records(count: int, sides: tuple[int, int], *, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations: every other one text only, every eighth with three images, else with one.

    Sides of images are log-uniform between ``sides``.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, count, 4)))
    made = []
    for i in range(count):
        num_images = 0 if i % 2 else 3 if i % 8 == 0 else 1
        shape = np.exp(rng.uniform(*np.log(sides), (num_images, 2))).astype(int).tolist()
        question, answer = (
            " ".join(rng.choice(np.array(_WORDS), int(rng.integers(4, 60))).tolist())
            for _ in range(2)
        )
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": question}]
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        images = [_drawn(rng, height, width) for height, width in shape]
        made.append({"messages": messages, "images": images})
    return made


def processed(made: list[dict[str, Any]], processor: Any) -> list[dict[str, Any]]:
    """What ``tokenize_chat`` returns of each, ids and labels as arrays."""
    from torch_collate_kit import ChatOptions, tokenize_chat

    examples = []
    for record in made:
        example = tokenize_chat(record, processor, ChatOptions(labels=True))
        for name in ("input_ids", "labels"):
            example[name] = np.asarray(example[name])
        names = ("input_ids", "labels", "pixel_values", "image_grid_thw")
        examples.append({name: example[name] for name in names if name in example})
    return examples


def image_mix(lengths: np.ndarray, *, longest: int, seed: int = 0) -> tuple[np.ndarray, Any]:
    """Tokens and patches of examples with these lengths of text, half of them with images.

    Of those, 80% have one image, the others two or three; a side has up to 1024 pixels.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, len(lengths), 5)))
    numbers = np.where(rng.random(len(lengths)) < 0.8, 1, rng.integers(2, 4, len(lengths)))
    numbers[rng.random(len(lengths)) < 0.5] = 0
    patches = patch_counts(rng, int(numbers.sum()))
    ends = np.cumsum(numbers)
    sums = np.append(0, np.cumsum(patches))
    images = sums[ends] - sums[ends - numbers]
    return np.minimum(lengths + images // MERGE**2, longest), (patches, np.append(0, ends))


def patch_counts(rng: np.random.Generator, count: int) -> np.ndarray:
    """int64 [count], of images whose sides are log-uniform between 128 and 1024 pixels."""
    sides = np.exp(rng.uniform(np.log(128), np.log(1024), (2, count)))
    grids = np.maximum(1, np.round(sides / (PATCH * MERGE))).astype(np.int64) * MERGE
    counts: np.ndarray = grids.prod(axis=0)
    return counts
