"""Images are upright, in the mode that the processor takes, and as large as their header says."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from tests.chat_images.test_loading import PICTURE, encoded, tokenize
from tests.chat_images.truth import (
    KINDS,
    assert_fields,
    assert_right,
    chat,
    fields_of,
    image,
    question,
    text,
)
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import DataError, tokenize_chat

FAMILY = FAMILIES["qwen3_vl"]


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


def late_exif(orientation: int) -> bytes:
    """A PNG whose orientation comes after its pixels."""
    data = encoded(PICTURE, "PNG")
    chunk = b"eXIf" + exif(orientation).tobytes().removeprefix(b"Exif\0\0")
    late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data[:-12] + late + data[-12:]


def xmp(orientation: int, kind: str) -> bytes:
    words = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="{orientation}"/></x:xmpmeta>'
    if kind == "PNG":
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", words)
        return encoded(PICTURE, "PNG", pnginfo=info)
    return encoded(PICTURE, kind, xmp=words.encode())


ORIENTED: dict[str, Callable[[int], bytes]] = {
    kind: lambda orientation, kind=kind: encoded(PICTURE, kind, exif=exif(orientation))
    for kind in ("JPEG", "PNG", "WEBP", "TIFF")
}
ORIENTED["PNG, after the pixels"] = late_exif
ORIENTED |= {
    f"{kind}, XMP": lambda orientation, kind=kind: xmp(orientation, kind)
    for kind in ("PNG", "JPEG", "WEBP")
}
if features.check("avif"):
    ORIENTED["AVIF"] = lambda orientation: encoded(PICTURE, "AVIF", exif=exif(orientation))


@pytest.mark.parametrize("kind", ORIENTED)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(kind: str, orientation: int) -> None:
    """Images are turned upright, and the size from the header is that of the turned image."""
    data = ORIENTED[kind](orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright.size == ((60, 90) if orientation >= 5 else (90, 60))
    opened, pixels = Image.open(io.BytesIO(data)), tokenize(upright)["pixel_values"]
    for source in (data, opened, opened):  # the second time it is loaded
        small, found = tokenize(source, pixels=False), tokenize(source)
        assert small["image_grid_thw"].tolist() == [[1, *((6, 4) if orientation >= 5 else (4, 6))]]
        assert found["input_ids"] == small["input_ids"]
        assert (found["pixel_values"] == pixels).all()


DEEP = ["I", "I;16"]
MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", *DEEP]


def in_mode(mode: str) -> Image.Image:
    """An image in the mode, half transparent where it can be."""
    if mode in DEEP:
        pixels = np.asarray(PICTURE.convert("L"))
        return Image.fromarray(pixels.astype(np.int32 if mode == "I" else np.uint16))
    picture = draw(np.random.default_rng(0), 60, 90)
    if mode in ("LA", "PA", "RGBA"):
        picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    found = picture.convert(mode)
    assert found.mode == mode
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_modes(name: str, mode: str) -> None:
    """Every mode gives what the processor makes of the image in this mode."""
    messages = chat([image(), text("What?")], "A cat.")
    assert_right(FAMILIES[name], messages, [in_mode(mode)], [1])


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("name", KINDS)
def test_processors_that_do_not_convert(name: str, mode: str) -> None:
    """Then it is done before, in the same way: on white where an image is transparent."""
    family, picture = FAMILIES[name], in_mode(mode)
    processor = family.make_processor()
    processor.image_processor.do_convert_rgb = None
    defaults = getattr(processor, "images_kwargs", {})
    processor.images_kwargs = {**defaults, "do_convert_rgb": None}
    found = tokenize_chat(question(picture), processor)
    assert_fields(found, fields_of(family, [picture]))


def test_transparent_palettes() -> None:
    picture = PICTURE.quantize(8)
    data = encoded(picture, "PNG", transparency=0)
    assert_fields(tokenize(data), fields_of(FAMILY, [Image.open(io.BytesIO(data))]))
    processor = FAMILY.make_processor()
    processor.image_processor.do_convert_rgb = False
    found = tokenize_chat(question(data), processor)
    assert_fields(found, fields_of(FAMILY, [Image.open(io.BytesIO(data))]))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_more_than_8_bits(dtype: Any) -> None:
    """PIL cuts them off at 255, so that a dark scan would become white."""
    deep = Image.fromarray(np.asarray(PICTURE.convert("L")).astype(dtype) * 100)
    with pytest.raises(DataError, match=r"has mode 'I.*' with values up to \d+, which conversion"):
        tokenize(deep)
    with pytest.raises(DataError, match=r"has mode 'F' .* cuts off at 255; scale it to 8 bits"):
        tokenize(Image.fromarray(np.zeros((30, 30), np.float32)))
    assert tokenize(encoded(deep, "PNG") if dtype is np.uint16 else deep, pixels=False)["input_ids"]
