"""What tokenize_chat should return for a chat with images, by the processor alone.

One call of the processor for the ids, one for each prompt and turn for the mask, and one for each
image for its fields. Every tokenizer here has a token per byte, so the ids of a text begin with
those of its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.chat.chats import tokenize
from tests.vision.families import FAMILIES, TinyFamily
from tests.vision.images import draw

NAMES = [name for name in FAMILIES if name not in ("paligemma", "mllama")]
KINDS = ("qwen2_vl", "qwen3_vl", "glm4v", "internvl", "llava_onevision", "llava_next", "idefics3")
KINDS += ("smolvlm", "gemma3")  # one of each processor
END = "<|im_end|>"
Messages = list[dict[str, Any]]
Fields = dict[str, np.ndarray]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image() -> dict[str, Any]:
    return {"type": "image"}


def chat(*contents: Any) -> Messages:
    """User and assistant in turn."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


def question(source: Any, answer: Any = "A cat.") -> dict[str, Any]:
    """A record with one image in its question."""
    return {"messages": chat([image(), text("What?")], answer), "images": [source]}


def assert_right(
    family: TinyFamily, messages: Messages, images: list[Any], turns: Sequence[int], **options: Any
) -> dict[str, Any]:
    """Return the result of a chat, which has the ids, mask and fields of the processor."""
    record = {"messages": messages, "images": images}
    found: Any = tokenize(record, family.processor(), **options)
    if isinstance(found, list):
        [found] = found  # the template never rewrites a turn, so that one example holds all
    ids, mask, fields = expected(family, messages, images, turns)
    assert (found["input_ids"], found["loss_mask"]) == (ids, mask)
    assert_fields(found, fields)
    result: dict[str, Any] = found
    return result


def turns_of(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def count_images(messages: Messages) -> int:
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    return sum(part["type"] == "image" for part in parts)


def ids_of(processor: Any, rendered: str, images: Sequence[Any]) -> list[int]:
    """The processor's own ids of a rendered text."""
    more = {"images": [list(images)]} if images else {}
    output = processor(text=[rendered], add_special_tokens=False, **more)
    ids: list[int] = output["input_ids"][0]
    return ids


def rendered(processor: Any, messages: Messages, **options: Any) -> str:
    found: str = processor.apply_chat_template(messages, tokenize=False, **options)
    return found


def expected(
    family: TinyFamily, messages: Messages, images: Sequence[Any], turns: Sequence[int]
) -> tuple[list[int], list[int], Fields]:
    """Ids, mask of the trained ``turns``, and fields of a chat that ends with the last of them."""
    processor = family.processor()
    messages = messages[: turns[-1] + 1]
    images = images[: count_images(messages)]
    ids = ids_of(processor, rendered(processor, messages), images)
    mask = [0] * len(ids)
    for turn in turns:
        prompt = rendered(processor, messages[:turn], add_generation_prompt=True)
        through = rendered(processor, messages[: turn + 1])
        through = through[: through.rindex(END) + len(END)]
        seen = images[: count_images(messages[:turn])]
        if family.name == "llava_onevision" and len(seen) == 1 < len(images):
            start = len(ids) - len(ids_after(processor, messages, prompt))
            stop = len(ids) - len(ids_after(processor, messages, through))
        else:
            start, stop = (len(ids_of(processor, part, seen)) for part in (prompt, through))
        mask[start:stop] = [1] * (stop - start)
    return ids, mask, fields_of(family, images)


def ids_after(processor: Any, messages: Messages, beginning: str) -> list[int]:
    """The ids after a beginning with one of several images, which LLaVA-OneVision does not cut."""
    rest = rendered(processor, messages).removeprefix(beginning)
    images = [draw(np.random.default_rng(0), 28, 28)] * rest.count(processor.image_token)
    tokens = processor.num_image_tokens + 1
    plain = rest.replace(processor.image_token, "")
    return ids_of(processor, plain, []) + [processor.image_token_id] * (len(images) * tokens)


def fields_of(family: TinyFamily, images: Sequence[Any]) -> Fields:
    """Every image alone through the processor, the results one after the other."""
    if not images:
        return {}
    processor = family.processor()
    if family.name == "llava_onevision" and len(images) > 1:  # these are not cut into tiles
        outputs = [_fields(processor, family, [image, image]) for image in images]
        outputs = [{name: value[:1] for name, value in output.items()} for output in outputs]
    else:
        outputs = [_fields(processor, family, [image]) for image in images]
    joined = {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}
    if "batch_num_images" in joined:
        joined["batch_num_images"] = np.array([len(images)])
    return joined


def _fields(processor: Any, family: TinyFamily, images: list[Any]) -> Fields:
    output = processor(
        text=[family.placeholder * len(images)], images=[images], return_tensors="np"
    )
    names = set(output) - {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    fields = {name: np.asarray(output[name]) for name in names}
    if fields["pixel_values"].ndim == 5:  # [images, tiles, ...] without padding, or [1, tiles, ...]
        for name in {"pixel_values", "pixel_attention_mask"} & names:
            fields[name] = np.concatenate(list(fields[name]))
    return fields


def assert_fields(found: dict[str, Any], wanted: Fields) -> None:
    """The vision fields of a result are these, with their dtypes, and no others."""
    others = {"input_ids", "loss_mask", "labels", "num_cut_tokens", "skip_reason", "record_index"}
    assert set(found) - others == set(wanted)
    for name, value in wanted.items():
        assert isinstance(found[name], np.ndarray), name
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert (found[name] == value).all(), name


def random_chat(rng: np.random.Generator) -> tuple[Messages, list[Any]]:
    """Two to six messages with zero to two images each in those of the user, and the images."""
    messages: Messages = []
    images = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": "Be brief."})
    for _ in range(int(rng.integers(1, 4))):
        parts = [text(_words(rng)) for _ in range(int(rng.integers(1, 3)))]
        for _ in range(int(rng.integers(0, 3))):
            parts.insert(int(rng.integers(0, len(parts) + 1)), image())
            height, width = rng.integers(20, 130, 2).tolist()
            images.append(draw(rng, height, width, str(rng.choice(["RGB", "L", "RGBA"]))))
        plain = len(parts) == 1 and rng.random() < 0.5
        messages.append({"role": "user", "content": parts[0]["text"] if plain else parts})
        messages.append({"role": "assistant", "content": _words(rng)})
    return messages, images


def _words(rng: np.random.Generator) -> str:
    words = ["cat", "Two", "a\nb", "x  y", "é", "<b>", "image", "?", "123"]
    return " ".join(rng.choice(words, int(rng.integers(1, 5))).tolist())
