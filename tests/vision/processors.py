"""Processors of vision-language families, built by hand: no hub, no torchvision.

Image processors are the PIL versions with small sizes. A processor that insists on a video
processor, which needs torchvision, is replaced by a subclass that has only the other two parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TILE = 56  # side of a tile or of a whole image in families of one image size, in pixels
PINPOINTS = [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168]]  # LLaVA: height, width
_PLAIN = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(special_tokens: Sequence[str], **attributes: str) -> Any:
    """One token per byte, after the special tokens; id 0 pads.

    ``attributes`` are the named tokens that processors look for, ``image_token="<image>"``.

    >>> tokenizer = tiny_tokenizer(["<image>"], image_token="<image>")
    >>> tokenizer("a<image>b")["input_ids"], tokenizer.image_token_id, tokenizer.pad_token_id
    ([70, 5, 71], 5, 0)
    """
    from transformers import PreTrainedTokenizerFast

    names = [*_PLAIN, *special_tokens]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate([*names, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=attributes,
    )


def chat_template(wrapped_image: str) -> str:
    """ChatML turns; an image part becomes ``wrapped_image``."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + wrapped_image
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _images_of(folder: str, name: str, **settings: Any) -> Any:
    """The image processor of a folder of transformers.models."""
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return getattr(module, f"{name}ImageProcessorPil")(**settings)


def processor_class(folder: str, name: str) -> type:
    """The processor of a folder of transformers.models."""
    module = importlib.import_module(f"transformers.models.{folder}.processing_{folder}")
    return getattr(module, f"{name}Processor")


def _without_video(kind: type, **members: Any) -> type:
    """The class with an image processor and a tokenizer only, under its own name."""

    def get_attributes(cls: type) -> list[str]:
        return ["image_processor", "tokenizer"]

    return type(
        kind.__name__,
        (kind,),
        {"get_attributes": classmethod(get_attributes), **members},
    )


_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")
_GLM_VIDEO = ("<|begin_of_video|>", "<|end_of_video|>")


def qwen(kind: type, patch_size: int) -> Any:
    factor = 2 * patch_size
    images = _images_of(
        "qwen2_vl",
        "Qwen2VL",
        patch_size=patch_size,
        size={"shortest_edge": factor**2, "longest_edge": 16 * factor**2},
    )
    tokenizer = tiny_tokenizer(_QWEN, image_token=_QWEN[2], video_token=_QWEN[3])
    return _without_video(kind)(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=chat_template("".join([_QWEN[0], _QWEN[2], _QWEN[1]])),
    )


def glm() -> Any:
    images = _images_of(
        "glm4v", "Glm4v", size={"shortest_edge": 2 * 28**2, "longest_edge": 32 * 28**2}
    )
    tokenizer = tiny_tokenizer([*_GLM, *_GLM_VIDEO], image_token=_GLM[2], video_token=_GLM[3])
    return _without_video(processor_class("glm4v", "Glm4v"))(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=chat_template("".join([_GLM[0], _GLM[2], _GLM[1]])),
    )


def internvl() -> Any:
    images = _images_of(
        "got_ocr2",
        "GotOcr2",
        size={"height": TILE, "width": TILE},
        crop_to_patches=True,
        max_patches=4,
    )
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return _without_video(processor_class("internvl", "InternVL"))(
        image_processor=images,
        tokenizer=tiny_tokenizer(list(names.values()), **names),
        image_seq_length=4,
        chat_template=chat_template("<IMG_CONTEXT>\n"),
    )


def llava_onevision() -> Any:
    images = _images_of(
        "llava_onevision",
        "LlavaOnevision",
        size={"height": TILE, "width": TILE},
        image_grid_pinpoints=PINPOINTS,
    )
    names = {"image_token": "<image>", "video_token": "<video>"}
    return _without_video(processor_class("llava_onevision", "LlavaOnevision"))(
        image_processor=images,
        tokenizer=tiny_tokenizer(list(names.values()), **names),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>\n"),
    )


def llava_next() -> Any:
    images = _images_of(
        "llava_next",
        "LlavaNext",
        size={"shortest_edge": TILE},
        crop_size={"height": TILE, "width": TILE},
        image_grid_pinpoints=PINPOINTS,
    )
    return processor_class("llava_next", "LlavaNext")(
        image_processor=images,
        tokenizer=tiny_tokenizer(["<image>"], image_token="<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>\n"),
    )


_IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
_ROWS = [f"<row_{row + 1}_col_{col + 1}>" for row in range(6) for col in range(6)]
_IDEFICS_SIZES = {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}}


def idefics3() -> Any:
    return processor_class("idefics3", "Idefics3")(
        image_processor=_images_of("idefics3", "Idefics3", **_IDEFICS_SIZES),
        tokenizer=tiny_tokenizer([*_IDEFICS, *_ROWS]),
        image_seq_len=4,
        chat_template=chat_template("<image>"),
    )


def smolvlm() -> Any:
    names = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "global_image_token": "<global-img>",
    }
    # Only texts about videos call num2words.
    # Its chat template method reads two settings of the video processor.
    video = SimpleNamespace(num_frames=1, fps=1)
    kind = processor_class("smolvlm", "SmolVLM")
    with mock.patch(f"{kind.__module__}.num2words", str):
        return _without_video(kind, video_processor=video)(
            image_processor=_images_of("smolvlm", "SmolVLM", **_IDEFICS_SIZES),
            tokenizer=tiny_tokenizer([*_IDEFICS, *_ROWS, "<video>"], **names),
            video_processor=None,
            image_seq_len=4,
            chat_template=chat_template("<image>"),
        )


def gemma3() -> Any:
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    return processor_class("gemma3", "Gemma3")(
        image_processor=_images_of("gemma3", "Gemma3", size={"height": TILE, "width": TILE}),
        tokenizer=tiny_tokenizer(list(names.values()), **names),
        image_seq_length=4,
        chat_template=chat_template("<start_of_image>"),
    )


def paligemma() -> Any:
    images = _images_of("siglip", "Siglip", size={"height": TILE, "width": TILE})
    images.image_seq_length = 16
    return processor_class("paligemma", "PaliGemma")(
        image_processor=images,
        tokenizer=tiny_tokenizer(["<image>"], image_token="<image>"),
        chat_template=chat_template("<image>"),
    )


def mllama() -> Any:
    return processor_class("mllama", "Mllama")(
        image_processor=_images_of("mllama", "Mllama", size={"height": TILE, "width": TILE}),
        tokenizer=tiny_tokenizer(["<|image|>", "<|python_tag|>"], image_token="<|image|>"),
        chat_template=chat_template("<|image|>"),
    )


def with_grids(name: str, folder: str, tokens: Sequence[str], **attributes: str) -> Any:
    """A processor of a family that is not in the table, by the prefix of its classes."""
    factor = 28
    size = {"shortest_edge": factor**2, "longest_edge": 16 * factor**2}
    return _without_video(processor_class(folder, name))(
        image_processor=_images_of(folder, name, size=size),
        tokenizer=tiny_tokenizer(tokens, **attributes),
    )


_QWEN_NAMES = {"image_token": _QWEN[2], "video_token": _QWEN[3]}
_GLM_NAMES = {"image_token": _GLM[2], "video_token": _GLM[3]}
_ERNIE_NAMES = {
    **_GLM_NAMES,
    **{"image_start_token": _GLM[0], "image_end_token": _GLM[1]},
    **{"video_start_token": _GLM_VIDEO[0], "video_end_token": _GLM_VIDEO[1]},
}
ernie = partial(
    with_grids, "Ernie4_5_VLMoe", "ernie4_5_vl_moe", [*_GLM, *_GLM_VIDEO], **_ERNIE_NAMES
)
video_llama = partial(with_grids, "VideoLlama3", "video_llama_3", _QWEN, **_QWEN_NAMES)


def ovis2() -> Any:
    """Its ids have another placeholder than the one that the processor names."""
    ends = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    return processor_class("ovis2", "Ovis2")(
        image_processor=_images_of("ovis2", "Ovis2", size={"height": TILE, "width": TILE}),
        tokenizer=tiny_tokenizer(["<image>", "<IMG_ATOM>", *ends]),
        image_seq_length=16,
    )


def qwen2() -> Any:
    return qwen(processor_class("qwen2_vl", "Qwen2VL"), 14)


def qwen3() -> Any:
    return qwen(processor_class("qwen3_vl", "Qwen3VL"), 16)
