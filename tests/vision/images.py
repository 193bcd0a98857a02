"""Small images with shapes in them, so that every patch of an image differs."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw


def draw(rng: np.random.Generator, height: int, width: int, mode: str = "RGB") -> Image.Image:
    """An image with a color gradient, rectangles, ellipses, a line and a little noise.

    Another state of ``rng`` gives other shapes and colors.

    >>> image = draw(np.random.default_rng(0), 28, 56)
    >>> image.size, image.mode  # PIL gives the width first
    ((56, 28), 'RGB')
    """
    down, across = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    corner, right, bottom = rng.uniform(0, 200, 3), rng.uniform(-90, 90, 3), rng.uniform(-90, 90, 3)
    smooth = corner + right * across + bottom * down
    image = Image.fromarray(smooth.clip(0, 255).astype(np.uint8), "RGB")
    canvas = ImageDraw.Draw(image)
    for _ in range(3):
        canvas.rectangle(_box(rng, height, width), fill=_color(rng))
        canvas.ellipse(_box(rng, height, width), outline=_color(rng), width=2)
    canvas.line(_box(rng, height, width), fill=_color(rng), width=2)
    noise = rng.integers(-12, 13, (height, width, 3))
    pixels = (np.asarray(image).astype(np.int64) + noise).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels, "RGB").convert(mode)


def _box(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    left, right = sorted(rng.integers(0, width, 2).tolist())
    top, bottom = sorted(rng.integers(0, height, 2).tolist())
    return left, top, right, bottom


def _color(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = rng.integers(0, 256, 3).tolist()
    return red, green, blue
