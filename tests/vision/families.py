"""Vision-language families in miniature: a model, its processor, and processed examples.

Models and processors are those of transformers with tiny sizes, so the fields of an example are
what a real processor returns. ``attention_mask`` is left out: it is all ones for one example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from tests.vision import models, processors
from tests.vision.images import draw

Example = dict[str, Any]
Part = str | tuple[int, int]
_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
_PER_TOKEN = ("input_ids", "labels", *_TYPES)


@dataclass(frozen=True)
class TinyFamily:
    """One family of models.

    name: as in CONFIGS, the ``model_type`` of its config.
    make_processor: builds a new processor.
    placeholder: what stands for an image in the text given to the processor.
    image_token: the token whose cells take the image features.
    wrap: the tokens that the chat template writes before and after the placeholder.
    per_example: vision fields whose first dimension is examples; it is removed in an example.
    suffix: the processor takes the last text apart from the prompt and makes the labels itself.
    """

    name: str
    make_processor: Callable[[], Any]
    placeholder: str
    image_token: str
    wrap: tuple[str, str] = ("", "")
    per_example: tuple[str, ...] = ()
    suffix: bool = False

    def processor(self) -> Any:
        """The processor, built once."""
        return _processor(self)

    def model(self, attn_implementation: str | dict[str, str] = "sdpa") -> Any:
        """The model, built once per attention, weights always equal. Leave its state alone."""
        if isinstance(attn_implementation, dict):
            return _model(self, tuple(sorted(attn_implementation.items())))
        return _model(self, attn_implementation)

    @property
    def image_token_id(self) -> int:
        return self.processor().tokenizer.convert_tokens_to_ids(self.image_token)

    @property
    def spatial_merge_size(self) -> int | None:
        """Patches per side of one placeholder in M-RoPE families, else None."""
        return getattr(self.model().config.vision_config, "spatial_merge_size", None)

    def example(
        self, rng: np.random.Generator, parts: Sequence[Part], *, wrapped: bool = False
    ) -> Example:
        """What the processor returns for this one example, without the batch dimension.

        A part is ``"text"`` (3 to 12 random tokens), another string (taken as it is) or the
        (height, width) of an image. ``wrapped`` writes start and end tokens around images where
        the family has them in its chat template; else placeholders of adjacent images touch.
        Fields per token are lists; vision fields are arrays, and text-only examples have none.
        ``labels`` are -100 in a prompt of random length, at the first token and at image tokens.
        """
        text, suffix, images = self.text_and_images(rng, parts, wrapped=wrapped)
        more: dict[str, Any] = {"images": [images]} if images else {}
        if suffix is not None:
            more["suffix"] = [suffix]
        fields = dict(self.processor()(text=[text], return_tensors="np", **more))
        return self._example(rng, fields)

    def text_and_images(
        self, rng: np.random.Generator, parts: Sequence[Part], *, wrapped: bool = False
    ) -> tuple[str, str | None, list[Image]]:
        """What :meth:`example` gives the processor: text, suffix (PaliGemma) and images."""
        before, after = self.wrap if wrapped else ("", "")
        image = before + self.placeholder + after
        texts = [_words(rng, part) if isinstance(part, str) else image for part in parts]
        images = [draw(rng, *part) for part in parts if not isinstance(part, str)]
        suffix = texts.pop() if self.suffix and isinstance(parts[-1], str) else None
        return "".join(texts), suffix, images

    def _example(self, rng: np.random.Generator, fields: dict[str, Any]) -> Example:
        del fields["attention_mask"]
        example: Example = {"input_ids": fields["input_ids"][0].tolist()}
        if "labels" not in fields:
            example["labels"] = self._labels(rng, example["input_ids"])
        for name, value in fields.items():
            if name in _PER_TOKEN:
                example[name] = value[0].tolist()
            else:
                example[name] = value[0] if name in self.per_example else value
        return example

    def model_inputs(self, example: Example) -> dict[str, Tensor]:
        """The example as a batch of 1, every field but ``labels``."""
        inputs = {}
        for name, value in example.items():
            if name != "labels":
                tensor = torch.as_tensor(value)
                batched = name in _PER_TOKEN or name in self.per_example
                inputs[name] = tensor[None] if batched else tensor
        return inputs

    def _labels(self, rng: np.random.Generator, input_ids: list[int]) -> list[int]:
        text = [i for i, token in enumerate(input_ids) if token != self.image_token_id]
        prompt = int(rng.integers(0, len(text) // 2 + 1))
        labels = [-100] * len(input_ids)
        for i in text[prompt:]:
            if i > 0:
                labels[i] = input_ids[i]
        return labels


@functools.cache
def _processor(family: TinyFamily) -> Any:
    return family.make_processor()


@functools.cache
def _model(family: TinyFamily, attention: str | tuple[tuple[str, str], ...]) -> Any:
    from torch_collate_kit.attention import register_torch_varlen

    register_torch_varlen()
    return models.build(
        family.name,
        vocab_size=len(family.processor().tokenizer),
        image_token_id=family.image_token_id,
        attn_implementation=attention if isinstance(attention, str) else dict(attention),
    )


def _words(rng: np.random.Generator, part: str) -> str:
    if part != "text":
        return part
    length = int(rng.integers(3, 13))
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz     .,\n"), length))


_QWEN = ("<|image_pad|>", "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>"))
_GLM = ("<|image|>", "<|image|>", ("<|begin_of_image|>", "<|end_of_image|>"))
_LLAVA = ("<image>", "<image>", ("", "\n"))
_IDEFICS = ("<image>", "<image>", ("", ""), ("pixel_values", "pixel_attention_mask"))
_MLLAMA_FIELDS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")

FAMILIES: dict[str, TinyFamily] = {
    family.name: family
    for family in [
        TinyFamily("qwen2_vl", processors.qwen2, *_QWEN),
        TinyFamily("qwen2_5_vl", processors.qwen2, *_QWEN),
        TinyFamily("qwen3_vl", processors.qwen3, *_QWEN),
        TinyFamily("qwen3_vl_moe", processors.qwen3, *_QWEN),
        TinyFamily("qwen3_5", processors.qwen3, *_QWEN),
        TinyFamily("qwen4_exp", processors.qwen3, *_QWEN),
        TinyFamily("glm4v", processors.glm, *_GLM),
        TinyFamily("glm4v_moe", processors.glm, *_GLM),
        TinyFamily("internvl", processors.internvl, "<IMG_CONTEXT>", "<IMG_CONTEXT>", ("", "\n")),
        TinyFamily("llava_onevision", processors.llava_onevision, *_LLAVA),
        TinyFamily("llava_next", processors.llava_next, *_LLAVA),
        TinyFamily("idefics3", processors.idefics3, *_IDEFICS),
        TinyFamily("smolvlm", processors.smolvlm, *_IDEFICS),
        TinyFamily("gemma3", processors.gemma3, "<start_of_image>", "<image_soft_token>"),
        TinyFamily("paligemma", processors.paligemma, "<image>", "<image>", suffix=True),
        TinyFamily(
            "mllama", processors.mllama, "<|image|>", "<|image|>", per_example=_MLLAMA_FIELDS
        ),
    ]
}
MROPE = [*(name for name in FAMILIES if name.startswith(("qwen", "glm")))]
# In no row of the kit's table.
UNKNOWN: dict[str, TinyFamily] = {
    family.name: family
    for family in [
        TinyFamily("ernie4_5_vl_moe", processors.ernie, *_GLM),
        TinyFamily("video_llama_3", processors.video_llama, *_QWEN),
        TinyFamily("ovis2", processors.ovis2, "<image>", "<IMG_ATOM>"),
    ]
}
