"""The forms in which records give images, and what is refused with which words."""

from __future__ import annotations

import base64
import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.chat.chats import refused
from tests.chat_images.truth import chat, expected, image, text
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import ChatOptions, tokenize_chat

FAMILY = FAMILIES["qwen3_vl"]
PICTURE = draw(np.random.default_rng(0), 60, 90)
OTHER = draw(np.random.default_rng(1), 40, 120)


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def uri(picture: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(picture)).decode()


def tokenize(record: Any, **options: Any) -> Any:
    return tokenize_chat(record, FAMILY.processor(), ChatOptions(**options))


def frozen(value: Any) -> Any:
    """A copy in which images are their pixels."""
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(frozen, value))
    if isinstance(value, (Image.Image, np.ndarray)):
        return np.asarray(value).tolist()
    return copy.deepcopy(value)


def assert_is(record: Any, wanted: Any, **options: Any) -> None:
    """The record gives what the wanted one does, is not changed, and gives it without pixels."""
    before = frozen(record)
    found, other = tokenize(record, **options), tokenize(wanted)
    assert found.keys() == other.keys()
    for name, value in other.items():
        assert np.array_equal(found[name], value), name
    assert frozen(record) == before
    assert tokenize(record, pixels=False, **options)["input_ids"] == other["input_ids"]


WANTED = {"messages": chat([image(), text("What is it?")], "A cat."), "images": [PICTURE]}


def test_the_wanted_record_is_right() -> None:
    ids, mask, _ = expected(FAMILY, WANTED["messages"], [PICTURE], [1])
    found = tokenize(WANTED)
    assert (found["input_ids"], found["loss_mask"]) == (ids, mask)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "PIL image": lambda folder: PICTURE,
    "path as string": lambda folder: str(folder / "a.png"),
    "Path": lambda folder: folder / "a.png",
    "file URL": lambda folder: (folder / "a b.png").as_uri(),
    "file URL with host": lambda folder: f"file://localhost{folder}/a.png",
    "bytes": lambda folder: png(PICTURE),
    "bytearray": lambda folder: bytearray(png(PICTURE)),
    "data URI": lambda folder: uri(PICTURE),
    "bytes of a column": lambda folder: {"bytes": png(PICTURE), "path": None},
    "bytes of a column, and a name": lambda folder: {"bytes": png(PICTURE), "path": "gone.png"},
    "path of a column": lambda folder: {"bytes": None, "path": str(folder / "a.png")},
    "array": lambda folder: np.asarray(PICTURE),
}


def with_part(**part: Any) -> dict[str, Any]:
    return {"messages": chat([part, text("What is it?")], "A cat.")}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources(kind: str, tmp_path: Path) -> None:
    for name in ("a.png", "a b.png"):
        PICTURE.save(tmp_path / name)
    source = SOURCES[kind](tmp_path)
    for given in ({"images": [source]}, {"images": (source,)}, {"image": source}):
        assert_is({"messages": WANTED["messages"], **given}, WANTED)
    assert_is(with_part(type="image", image=source), WANTED)


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_parts(kind: str, tmp_path: Path) -> None:
    file, data = tmp_path / "a.png", uri(PICTURE)
    PICTURE.save(file)
    parts: list[dict[str, Any]] = [
        {"path": str(file)},
        {"url": file.as_uri()},
        {"url": str(file)},
        {"image_url": {"url": data}},  # OpenAI
        {"image_url": {"url": file.as_uri(), "detail": "high"}},
        {"image_url": data},
        {"base64": base64.b64encode(png(PICTURE)).decode()},
        {"image": None, "path": file, "text": None},
    ]
    for part in parts:
        assert_is(with_part(type=kind, **part), WANTED)


def test_parts_with_an_image_and_parts_of_the_column_in_one_record() -> None:
    own = {"type": "image", "image": OTHER}
    messages = chat([image(), own, text("and"), image()], "Yes.")
    record = {"messages": messages, "images": [PICTURE, OTHER]}
    parts = [image(), image(), text("and"), image()]
    assert_is(record, {"messages": chat(parts, "Yes."), "images": [PICTURE, OTHER, OTHER]})


SYSTEM = {"role": "system", "content": "Be brief."}
MARKED = chat("<image>What is it?", "A cat.")
TURNS = [
    {"from": "human", "value": "First <image>\nand <image><image>?"},
    {"from": "gpt", "value": "Yes."},
    {"from": "human", "value": "<image>"},
    {"from": "gpt", "value": "No."},
]
FIRST = [text("First "), image(), text("\nand "), image(), image(), text("?")]
FOUR = [PICTURE, OTHER, PICTURE, OTHER]


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"messages": MARKED, "images": [PICTURE]}, WANTED),
        ({"messages": MARKED, "image": PICTURE}, WANTED),
        ({"conversations": TURNS, "images": FOUR},
         {"messages": chat(FIRST, "Yes.", [image()], "No."), "images": FOUR}),
        ({"prompt": WANTED["messages"][:1], "completion": WANTED["messages"][1:],
          "images": [PICTURE]}, WANTED),
        ({**WANTED, "system": "Be brief."}, {**WANTED, "messages": [SYSTEM, *WANTED["messages"]]}),
    ],
    ids=["markers", "one image", "ShareGPT", "prompt and completion", "system column"],
)  # fmt: skip
def test_forms_of_records(record: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_is(record, wanted)


def test_a_system_message_with_an_image() -> None:
    system = {"role": "system", "content": [text("Be like "), image()]}
    messages = [system, *WANTED["messages"]]
    record = {"messages": messages, "images": [OTHER, PICTURE]}
    ids, mask, _ = expected(FAMILY, messages, [OTHER, PICTURE], [2])
    assert (tokenize(record)["input_ids"], tokenize(record)["loss_mask"]) == (ids, mask)
    message = "the `system` column and a system message differ"
    refused({**record, "system": "Be brief."}, FAMILY.processor(), message)


def test_the_result_of_a_tool_may_have_an_image() -> None:
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": [text("Seen: "), image()]},
        {"role": "assistant", "content": "A cat."},
    ]
    found = tokenize({"messages": messages, "images": [PICTURE]})
    ids, mask, _ = expected(FAMILY, messages, [PICTURE], [1, 3])
    assert (found["input_ids"], found["loss_mask"]) == (ids, mask)


def test_markers_without_a_column_are_text() -> None:
    found = tokenize({"messages": chat("What is <image>?", "A tag.")})
    assert "<image>" in FAMILY.processor().tokenizer.decode(found["input_ids"])


QUESTION = [image(), text("What?")]
ASKED = {"messages": chat(QUESTION, "A cat.")}
PLAIN = {"messages": chat("What?", "A cat.")}
BASE64, LOW = {"type": "image", "base64": "abc!"}, {"type": "image_url", "image_url": {"detail": 1}}
COUNT = "have {} image parts (or <image> markers) without an image of their own, and "
STANDS = "has the text '<|image_pad|>', which stands for an image"


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": chat(list(parts), "A cat.")}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (ASKED, COUNT.format(1) + "there are no images; each part needs one, in order"),
    (asked(image(), *QUESTION) | {"images": [PICTURE]}, COUNT.format(2) + "`images` has 1 images"),
    (ASKED | {"images": [PICTURE, OTHER]}, COUNT.format(1) + "`images` has 2"),
    (PLAIN | {"images": [PICTURE]}, COUNT.format(0) + "`images` has 1"),
    (PLAIN | {"image": PICTURE}, "and `image` has 1 images"),
    ({"messages": MARKED, "images": [PICTURE, OTHER]}, COUNT.format(1) + "`images` has 2"),
    ({"messages": MARKED, "images": []}, COUNT.format(1) + "there are no"),
    (asked({"type": "image", "image": OTHER}) | {"images": [PICTURE]}, COUNT.format(0)),
    ({"prompt": "<image>What?", "completion": "A cat.", "images": [PICTURE]}, COUNT.format(0)),
    (ASKED | {"images": [PICTURE], "image": PICTURE}, "`images` and `image` are both given; keep"),
    (ASKED | {"images": PICTURE}, "`images` must be a list, got Image; put one image into a list"),
    (ASKED | {"image": [PICTURE]}, "`image` is a list; rename the column to `images`"),
    (asked({"type": "image", "path": "a", "url": "b"}), "has 'path' and 'url'; keep one of"),
    (asked(LOW), "messages[0] content[0] has an `image_url` without a `url`; give one"),
    (asked(text("a"), BASE64), "messages[0] content[1] has invalid base64"),
    (asked({"type": "video", "video": "a.mp4"}), "messages[0] content[0] is of type 'video', but"),
    (asked({"type": "input_audio"}), "is of type 'input_audio', but only images are processed"),
    (PLAIN | {"videos": ["a.mp4"]}, "`videos` is given, but only images are processed; remove it"),
    ({"messages": chat("What is <|image_pad|>?", "A token.")}, f"messages[0] {STANDS}; remove"),
    ({"messages": chat(QUESTION, "A <|image_pad|>."), "images": [PICTURE]}, "[1] " + STANDS),
    ({"prompt": "<|image_pad|>What?", "completion": "A cat."},
     "the text has 1 placeholders '<|image_pad|>' for 0 images"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "message"), REFUSED)
def test_refused(record: dict[str, Any], message: str) -> None:
    for pixels in (True, False):
        refused(record, FAMILY.processor(), re.escape(message), pixels=pixels)


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_a_token_of_an_image_in_a_text(name: str) -> None:
    """Gemma's image tokens are not what its template writes."""
    family = FAMILIES[name]
    word = family.image_token
    for content in (f"What is {word}?", [image(), text(f"What is {word}?")]):
        images = [PICTURE] if isinstance(content, list) else None
        record = {"messages": chat(content, "A token."), "images": images}
        refused(record, family.processor(), f"{word}.* stands for ")


def test_images_and_only_a_tokenizer() -> None:
    tokenizer = copy.copy(FAMILY.processor().tokenizer)
    tokenizer.chat_template = FAMILY.processor().chat_template
    refused(WANTED, tokenizer, "have images, which a tokenizer alone does not read; pass ")


@pytest.mark.parametrize("count", [0, 2])
def test_templates_that_do_not_write_each_image_once(count: int) -> None:
    processor = FAMILY.make_processor()
    whole = "<|vision_start|><|image_pad|><|vision_end|>"
    processor.chat_template = processor.chat_template.replace(whole, "<|image_pad|>" * count)
    message = f"writes {count} placeholders .* for 1 images; set a chat_template that writes one"
    refused(WANTED, processor, message)


def test_options() -> None:
    processor = FAMILY.processor()
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (None, {}, TypeError, "tokenizer must be a tokenizer or processor, got NoneType"),
        (processor, {"pixels": 1}, TypeError, "pixels must be True or False"),
        (processor, {"max_pixels": 0}, ValueError, "max_pixels must be 1 to"),
        (processor, {"max_pixels": 10**9}, ValueError, "raise PIL.Image.MAX_IMAGE"),
        (processor, {"max_pixels": 1e6}, TypeError, "max_pixels must be an int or N"),
        (processor, {"image_root": "/no/folder"}, ValueError, "must be a folder, got"),
        (processor.tokenizer, {"pixels": False}, ValueError, "pass the processor in place of the"),
        (FAMILIES["mllama"].processor(), {}, ValueError, "are not supported: a token"),
        (FAMILIES["paligemma"].processor(), {}, ValueError, "has no conversations, but"),
    ]
    for loaded, options, error, message in cases:
        with pytest.raises(error, match=message):
            tokenize_chat(WANTED, loaded, ChatOptions(**options))
    with pytest.raises(TypeError, match="options must be ChatOptions, got dict; pass ChatOptions"):
        tokenize_chat(WANTED, processor, {"train_on": "last"})


def test_a_processor_of_no_known_family() -> None:
    class Odd:
        image_processor = FAMILY.processor().image_processor
        tokenizer = FAMILY.processor().tokenizer

    with pytest.raises(ValueError, match="Odd is not in the table of families"):
        tokenize_chat(WANTED, Odd())


def test_templates_by_name_and_of_the_tokenizer() -> None:
    """The processor's templates come first, "default" among several, "tool_use" with tools."""
    processor = FAMILY.make_processor()
    plain = processor.chat_template
    wanted = tokenize(WANTED)["input_ids"]
    loud = plain.replace("<|im_start|>{{", "<|im_start|>LOUD {{").replace(
        "<|im_start|>assistant", "<|im_start|>LOUD assistant"
    )
    tool = {"type": "function", "function": {"name": "LOUD", "parameters": {}}}
    processor.chat_template = {"default": plain, "loud": loud, "tool_use": loud}
    assert tokenize_chat(WANTED, processor)["input_ids"] == wanted
    asked = ChatOptions(chat_template="loud")
    other = tokenize_chat(WANTED, processor, asked)["input_ids"]
    assert tokenize_chat(WANTED, processor, ChatOptions(chat_template=loud))["input_ids"] == other
    assert "LOUD user" in processor.tokenizer.decode(other)
    with_tools = tokenize_chat(WANTED, processor, ChatOptions(tools=[tool]))["input_ids"]
    assert with_tools == other
    processor.chat_template, processor.tokenizer.chat_template = None, plain
    assert tokenize_chat(WANTED, processor)["input_ids"] == wanted
    processor.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat_template"):
        tokenize_chat(WANTED, processor)
