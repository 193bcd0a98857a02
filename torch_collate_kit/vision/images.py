"""Images of datasets in any form, read as PIL images or only for their sizes."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from torch_collate_kit._checks import needed_package
from torch_collate_kit.errors import DataError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|data:")
# Formats whose orientation is known before the pixels are read.
_HEADER_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP")
_DRAWINGS = ("EPS", "WMF", "EMF")  # PIL runs other programs for these
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 swap height and width


class ImageFiles(NamedTuple):
    """The folder and the size limit of images.

    A source is a path (string, ``file://`` URL or ``os.PathLike``), a data URI, bytes, a PIL image,
    a uint8 array [H, W] or [H, W, 1, 3 or 4], or the dict of a ``datasets.Image`` column.
    """

    root: Path | None
    """Folder of relative paths, which no path may leave. None: the working directory, any path."""
    max_pixels: int | None
    """Height times width; None: the limit of PIL (``PIL.Image.MAX_IMAGE_PIXELS``)."""

    def load(self, source: Any, where: str) -> Any:
        """Return the decoded PIL image, upright by its EXIF orientation, in its own mode."""
        with self._opened(source, where) as image, _decoding(where):
            upright = _package().ImageOps.exif_transpose(image)
        _check_depth(upright, where)
        return upright

    def size(self, source: Any, where: str) -> tuple[int, int]:
        """Return height and width of :meth:`load`'s image, without decoding if possible."""
        with self._opened(source, where) as image, _decoding(where):
            if image.format not in (None, *_HEADER_FORMATS):
                image.load()
            if image.format == "PNG" and not _has_late_texts(image):
                exif = _package().Image.Image.getexif(image)  # that of PNG reads all pixels first
            else:
                exif = image.getexif()
            turned = exif.get(_ORIENTATION, 1) in (5, 6, 7, 8)
            width, height = image.size
        return (width, height) if turned else (height, width)

    @contextmanager
    def _opened(self, source: Any, where: str) -> Iterator[Any]:
        """Open the image with its header read and checked; files are closed at the end."""
        if isinstance(source, Mapping):  # of a datasets.Image column that is not decoded
            found = source.get("bytes") if source.get("bytes") is not None else source.get("path")
            source = source if found is None else found
        if isinstance(source, np.ndarray):
            channels = source.shape[2] if source.ndim == 3 else 1
            if source.dtype != np.uint8 or source.ndim not in (2, 3) or channels not in (1, 3, 4):
                raise DataError(
                    f"{where} is an array of shape {source.shape} and dtype {source.dtype}; give "
                    "uint8 of shape [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]"
                )
            source = np.ascontiguousarray(source[..., 0] if source.shape[2:] == (1,) else source)
            source = _package().Image.fromarray(source)
        if isinstance(source, _package().Image.Image):
            self._check_header(source, where)
            yield source
            return
        if isinstance(source, str) and source.startswith("data:"):
            source = _from_data_uri(source, where)
        if isinstance(source, (bytes, bytearray)):
            file: Any = io.BytesIO(source)
            name = f"{len(source)} bytes"
        elif isinstance(source, (str, os.PathLike)):
            name = repr(str(source))
            file = _open_file(self._path(source, where), name, where)
        else:
            kind = f"of type {type(source).__name__}"
            if isinstance(source, Mapping):
                kind = f"a dict with the keys {sorted(map(str, source))} and no `bytes` or `path`"
            raise DataError(
                f"{where} is {kind}; give a path, bytes, a data URI, a PIL image, a uint8 array, "
                "or the dict of a datasets.Image column"
            )
        with file, self._open(file, where, name) as image:
            self._check_header(image, where)
            yield image

    def _open(self, file: Any, where: str, name: str) -> Any:
        pil = _package().Image
        try:
            return pil.open(file)
        except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
            raise DataError(
                f"{where}, {name}: {str(error).rstrip('.')}; make it smaller, or raise "
                "PIL.Image.MAX_IMAGE_PIXELS"
            ) from error
        except Exception as error:  # a damaged header raises anything
            if not file.seek(0, os.SEEK_END):
                raise DataError(f"{where}, {name}: it is empty; replace it") from error
            # The message of PIL has the address of the file object.
            reason = "" if isinstance(error, _package().UnidentifiedImageError) else f" ({error})"
            raise DataError(
                f"{where}, {name}: no image that PIL can read{reason}; replace or convert it"
            ) from error

    def _check_header(self, image: Any, where: str) -> None:
        pil = _package().Image
        width, height = image.size
        limit = pil.MAX_IMAGE_PIXELS if self.max_pixels is None else self.max_pixels
        if limit is not None and width * height > limit:
            raise DataError(
                f"{where} has {height} x {width} = {height * width} pixels, more than "
                f"max_pixels={limit}; make it smaller, or pass a higher max_pixels"
            )
        if width * height == 0:
            raise DataError(f"{where} has {height} x {width} pixels; replace it")
        if image.format in _DRAWINGS:
            raise DataError(f"{where} is a drawing ({image.format}), not pixels; convert it to PNG")
        with _decoding(where):
            frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # MPO: a photo and its preview or depth
            raise DataError(
                f"{where} has {frames} frames; give the frames that are meant as images"
            )

    def _path(self, source: Any, where: str) -> Path:
        """Return the file of a path or URL, inside ``root``."""
        text = os.fspath(source)
        if isinstance(text, bytes):
            text = os.fsdecode(text)
        if text.startswith("file://"):
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise DataError(f"{where}, {text!r}: a file on another host; download it first")
            text = unquote(parts.path)
        elif _SCHEME.match(text):
            raise DataError(
                f"{where}, {text!r:.80}: images are not downloaded; download it first and give "
                "the path of the file"
            )
        try:
            if self.root is None:
                return Path(text).resolve()
            path = (self.root / text).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise DataError(f"{where}, {text!r:.80}: {error}; correct the path") from error
        if not path.is_relative_to(self.root):
            raise DataError(
                f"{where}, {text!r}: {path} is outside image_root={str(self.root)!r}; move the "
                "file, or pass another image_root"
            )
        return path


def image_files(root: Any = None, max_pixels: int | None = None) -> ImageFiles:
    """Return the checked folder and size limit of images."""
    if root is not None:
        if not os.path.isdir(root):
            raise ValueError(f"image_root must be a folder, got {str(root)!r}")
        root = Path(root).resolve()
    if max_pixels is not None:
        if isinstance(max_pixels, bool) or not hasattr(max_pixels, "__index__"):
            raise TypeError(f"max_pixels must be an int or None, got {max_pixels!r}")
        limit = _package().Image.MAX_IMAGE_PIXELS
        if max_pixels < 1 or (limit is not None and max_pixels > limit):
            raise ValueError(
                f"max_pixels must be 1 to {limit}, the limit of PIL, got {max_pixels}; to allow "
                "larger images raise PIL.Image.MAX_IMAGE_PIXELS, too"
            )
    return ImageFiles(root, None if max_pixels is None else int(max_pixels))


def _package() -> Any:
    """Import PIL with the modules used here."""
    needed_package("PIL", "reading an image", install="pillow")
    import PIL.Image
    import PIL.ImageFile
    import PIL.ImageOps

    return PIL


@contextmanager
def _decoding(where: str) -> Iterator[None]:
    """Raise errors of the decoder as DataErrors."""
    if _package().ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True, so the missing part of a damaged image "
            "would be trained as grey; set it to False"
        )
    try:
        yield
    except Exception as error:  # damaged files raise anything: OSError, SyntaxError, struct.error
        raise DataError(f"{where} is damaged or cut off ({error}); replace it") from error


def _open_file(path: Path, name: str, where: str) -> Any:
    try:
        if path.is_file():
            return path.open("rb")
        if path.is_dir():
            problem = f"{path} is a folder; give the path of a file"
        elif path.exists():
            problem = f"{path} is not a regular file; give the path of one"
        else:
            problem = f"the file {path} does not exist; correct the path, or pass image_root"
    except (OSError, ValueError) as error:
        problem = f"{error}; correct the path"
    raise DataError(f"{where}, {name:.200}: {problem}")


def _from_data_uri(uri: str, where: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise DataError(
            f"{where} is a data URI that begins with {header[:40]!r}; only "
            "data:image/...;base64,... is read"
        )
    return decoded_base64(payload, f"{where} is a data URI and")


def decoded_base64(text: str, where: str) -> bytes:
    """Decode base64, ignoring white space. Raises DataError if it is invalid."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} has invalid base64 ({error}); fix it") from error


def _check_depth(image: Any, where: str) -> None:
    """Refuse pixels of more than 8 bits that conversion to RGB would cut off."""
    low, high = image.getextrema() if image.mode == "F" or image.mode[0] == "I" else (0, 0)
    if image.mode == "F" or low < 0 or high > 255:
        raise DataError(
            f"{where} has mode {image.mode!r} with values of {low} to {high}, of which conversion "
            "to RGB keeps whole numbers up to 255 alone; scale it to 8 bits"
        )


def _has_late_texts(image: Any) -> bool:
    """Check whether a PNG has texts after its pixels, which may hold its orientation."""
    if image.fp is None:  # all is read
        return True
    file, start = image.fp, image.fp.tell()
    try:
        file.seek(8)
        seen_pixels = False
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if seen_pixels and kind in _PNG_TEXTS:
                return True
            seen_pixels |= kind == b"IDAT"
            file.seek(length + 4, os.SEEK_CUR)
        return False
    finally:
        file.seek(start)
