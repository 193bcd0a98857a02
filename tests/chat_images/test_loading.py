"""Reading images: strict, safe, upright, in the mode that the processor takes."""

from __future__ import annotations

import io
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, features

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
from torch_collate_kit import ChatOptions, DataError, tokenize_chat

FAMILY = FAMILIES["qwen3_vl"]
RNG = np.random.default_rng(0)
PICTURE = draw(RNG, 60, 90)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def tokenize(source: Any, **options: Any) -> Any:
    return tokenize_chat(question(source), FAMILY.processor(), ChatOptions(**options))


def assert_read(source: Any, **options: Any) -> None:
    assert tokenize(source, **options)["input_ids"] == tokenize(PICTURE)["input_ids"]


def refusal(source: Any, **options: Any) -> str:
    """The message, which is the same for pixels and for sizes alone."""
    messages = []
    for pixels in (True, False):
        with pytest.raises(DataError) as caught:
            tokenize(source, pixels=pixels, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


# ---- paths


def test_relative_paths_start_in_image_root(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "sub").mkdir()
    PICTURE.save(tmp_path / "sub" / "a.png")
    assert_read("sub/a.png", image_root=tmp_path)
    assert_read("a.png", image_root=str(tmp_path / "sub"))
    assert "does not exist; correct the path, or pass image_root" in refusal("sub/a.png")
    monkeypatch.chdir(tmp_path)
    assert_read("sub/a.png")
    assert_read("a.png", image_root="sub")


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    gone, pipe, loop = (tmp_path / name for name in ("gone.png", "pipe", "loop"))
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    assert refusal(gone) == (
        f"`images`[0], '{gone}': the file {gone} does not exist; correct the path, or pass "
        "image_root"
    )
    for path, message in (
        (tmp_path, f"{tmp_path} is a folder; give the path of a file"),
        (pipe, f"{pipe} is not a regular file; give the path of one"),
        ("a" * 5000 + ".png", "correct the path"),
        (loop, ""),
    ):
        assert refusal(path).endswith(message)
    for root in (None, tmp_path):
        assert "null" in refusal("a\0b.png", image_root=root)
    refusal("loop", image_root=tmp_path)


def test_urls_are_not_downloaded() -> None:
    for url in ("http://a.b/c.png", "https://a.b/c.png", "s3://a/c.png", "hf://datasets/a/c.png"):
        message = "images are not downloaded; download it first and give the path of the file"
        assert refusal(url) == f"`images`[0], '{url}': {message}"
        assert "download it first" in refusal(url, image_root="/")
        record = {"messages": chat([{"type": "image", "url": url}], "A cat.")}
        with pytest.raises(DataError, match=r"messages\[0\] content\[0\], '.*download it first"):
            tokenize_chat(record, FAMILY.processor())
    assert "a file on another host; download it first" in refusal("file://host/a.png")


def test_image_root_is_not_left(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "rooted"
    for folder in (root, outside):
        folder.mkdir()
        PICTURE.save(folder / "a.png")
    (root / "link.png").symlink_to(outside / "a.png")
    (root / "inner.png").symlink_to(root / "a.png")
    (root / "folder").symlink_to(outside)
    for inside in ("a.png", root / "a.png", "./x/../a.png", "inner.png", (root / "a.png").as_uri()):
        assert_read(inside, image_root=root)
    for path in (
        "../rooted/a.png", "link.png", "folder/a.png", outside / "a.png",
        (outside / "a.png").as_uri(), "/etc/passwd", "file:///etc/passwd",
        "../../../../../etc/passwd", {"bytes": None, "path": "../rooted/a.png"},
    ):  # fmt: skip
        message = refusal(path, image_root=root)
        assert f"is outside image_root='{root}'; move the file, or pass another image" in message
    (tmp_path / "alias").symlink_to(root)
    assert_read(root / "a.png", image_root=tmp_path / "alias")


# ---- what is in the file


def test_empty_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"")
    assert refusal(path) == f"`images`[0], '{path}': it is empty; replace it"
    for empty in (b"", {"bytes": b"", "path": "a.png"}):
        assert refusal(empty) == "`images`[0], 0 bytes: it is empty; replace it"
    path.write_text("This is a text.")
    message = f"`images`[0], '{path}': no image that PIL can read; replace or convert it"
    assert refusal(path).startswith(message)
    assert refusal(b"text" * 9).startswith("`images`[0], 36 bytes: no image that PIL can read")
    assert refusal("data:image/png;base64,").endswith("it is empty; replace it")
    assert "data:image/...;base64,... is read" in refusal("data:image/svg+xml,<svg/>")
    assert "invalid base64" in refusal("data:image/png;base64,a-b")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (3, "is of type int; give a path, bytes, a data URI, a PIL image, a uint8 array"),
        ({"data": b""}, "is a dict with the keys ['data'] and no `bytes` or `path`; give a path"),
        ({"bytes": None, "path": None}, "is a dict with the keys []"),
        (np.zeros((3, 8, 8), np.uint8), "is an array of shape (3, 8, 8) and dtype uint8; give"),
        (np.zeros((8, 8, 3)), "is an array of shape (8, 8, 3) and dtype float64; give uint8 of"),
        (np.zeros((0, 8, 3), np.uint8), "has 0 x 8 pixels; replace it"),
        (Image.new("RGB", (0, 8)), "has 8 x 0 pixels; replace it"),
    ],
)
def test_what_is_no_image(source: Any, kind: str) -> None:
    if isinstance(source, dict) and "path" in source:
        kind = "is a dict with the keys ['bytes', 'path'] and no `bytes` or `path`"
    assert refusal(source).startswith(f"`images`[0] {kind}")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_cut_off_files_are_never_half_an_image(kind: str, tmp_path: Path) -> None:
    """At every twentieth of its bytes; the same image when only what follows the pixels is lost."""
    picture = draw(RNG, 64, 96)
    data = encoded(picture, kind)
    whole = tokenize(Image.open(io.BytesIO(data)).convert("RGB"))["pixel_values"]
    refused = 0
    for cut in [*range(0, len(data), max(1, len(data) // 20)), len(data) - 1, len(data) - 2]:
        try:
            found = tokenize(data[:cut])
        except DataError:
            refused += 1
        else:
            assert (found["pixel_values"] == whole).all()
    assert refused >= 19
    half = tmp_path / "half"
    half.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"`images`\[0\](, .*)? .*; replace"):
        tokenize(half)


def test_damaged_files(tmp_path: Path) -> None:
    """Bytes changed at random: an image or a DataError, never another exception."""
    rng = np.random.default_rng(1)
    refused = 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF"):
        data = np.frombuffer(encoded(draw(rng, 40, 50), kind), np.uint8)
        for _ in range(25):
            damaged = data.copy()
            damaged[rng.integers(0, len(data), 8)] = rng.integers(0, 256, 8)
            for pixels in (True, False):
                try:
                    tokenize(damaged.tobytes(), pixels=pixels)
                except DataError:
                    refused += 1
    assert refused > 40


def test_truncated_images_are_not_allowed_globally(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize(PICTURE)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match=r"LOAD_TRUNCATED_IMAGES is True, so .* set it to False"):
        tokenize(encoded(PICTURE, "PNG"))


def png_header(height: int, width: int) -> bytes:
    """A PNG that says a size, and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IDAT" + zlib.compress(b"\0" * 10)
    chunks = [
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (body, end)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_too_many_pixels(tmp_path: Path) -> None:
    for limit in (60 * 90, 89_478_485):
        assert_read(PICTURE, max_pixels=limit)
    way_out = "make it smaller, or pass a higher max_pixels"
    assert refusal(PICTURE, max_pixels=60 * 90 - 1) == (
        f"`images`[0] has 60 x 90 = 5400 pixels, more than max_pixels=5399; {way_out}"
    )
    PICTURE.save(tmp_path / "a.png")
    assert "max_pixels=5000" in refusal(tmp_path / "a.png", max_pixels=5000)


@pytest.mark.parametrize("action", ["ignore", "error"])
@pytest.mark.parametrize("side", [10_000, 20_000])
def test_decompression_bombs_are_errors(side: int, action: Any) -> None:
    """Also where PIL itself would only warn, from its limit to twice that."""
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        message = refusal(png_header(side, side))
    assert " pixels" in message
    assert "make it smaller, or" in message


def test_no_limit_where_pil_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert tokenize(png_header(20_000, 20_000), pixels=False)["input_ids"]
    with pytest.raises(DataError, match="more than max_pixels=1000"):
        tokenize(png_header(20_000, 20_000), pixels=False, max_pixels=1000)


def test_drawings_and_animations() -> None:
    message = "`images`[0] is a drawing (EPS), not pixels; convert it to PNG"
    assert refusal(encoded(PICTURE, "EPS")) == message  # not given to another program
    first, *rest = (draw(RNG, 30, 30) for _ in range(3))
    data = encoded(first, "GIF", save_all=True, append_images=rest)
    assert refusal(data) == "`images`[0] has 3 frames; give the frames that are meant as images"
    mpo = encoded(first, "MPO", save_all=True, append_images=rest)
    photo = Image.open(io.BytesIO(mpo))  # what cameras write: a photo, and its preview
    assert (tokenize(mpo)["pixel_values"] == tokenize(photo.convert("RGB"))["pixel_values"]).all()


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="an image needs the package PIL: pip install pillow"):
        tokenize(b"")


def test_files_are_closed(tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(3):
            tokenize(tmp_path / "a.png")
            tokenize(tmp_path / "a.png", pixels=False)
            with pytest.raises(DataError):
                tokenize(tmp_path / "b.png")


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
    with pytest.raises(DataError, match=r"has mode 'I.*' with values of \d+ to \d+, of which"):
        tokenize(deep)
    for zeros, mode in ((np.zeros((30, 30), np.float32), "F"), (np.full((30, 30), -5), "I")):
        with pytest.raises(DataError, match=f"has mode '{mode}' .*; scale it to 8 bits"):
            tokenize(Image.fromarray(zeros.astype(np.int32) if mode == "I" else zeros))
    assert tokenize(encoded(deep, "PNG") if dtype is np.uint16 else deep, pixels=False)["input_ids"]
