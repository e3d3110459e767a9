"""Drawing of scenes: shapes, colours and sizes that stay apart at 32 pixels as well as at 224."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from planaria.data.sample import Pixels

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 25, 30),
    "green": (20, 140, 50),
    "blue": (30, 60, 220),
    "yellow": (245, 200, 0),
    "black": (20, 20, 20),
    "purple": (130, 30, 160),
    "orange": (255, 115, 0),
    "pink": (255, 120, 190),
}
"""Names and sRGB values; a job that asks for fewer colours gets the first ones."""

SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 0.27, "large": 0.44}
"""Width of a shape as a share of the picture's side; a large one still fits into a quarter."""


@dataclass(frozen=True)
class Shape:
    """What one thing in a scene is."""

    colour: str
    shape: str
    size: str


@dataclass(frozen=True)
class Placed:
    """A shape and the centre of its bounding square, as shares of the picture's side."""

    item: Shape
    x: float
    y: float


def render(scene: Sequence[Placed], ground: tuple[float, float, float], size: int) -> Pixels:
    """The picture, uint8 [size, size, 3], on a ``ground`` colour given in 0..255."""
    # Drawn larger and averaged down: without it an 8-pixel circle and an 8-pixel square look alike.
    scale = 8 if size <= 64 else 2
    side = size * scale
    picture = Image.new("RGB", (side, side), (int(ground[0]), int(ground[1]), int(ground[2])))
    pen = ImageDraw.Draw(picture)
    for placed in scene:
        half = SIZES[placed.item.size] / 2
        _draw(pen, placed.item, placed.x * side, placed.y * side, half * side)
    return np.asarray(picture.reduce(scale), dtype=np.uint8)


def _draw(pen: ImageDraw.ImageDraw, item: Shape, x: float, y: float, half: float) -> None:
    fill = COLOURS[item.colour]
    left, top, right, bottom = x - half, y - half, x + half, y + half
    if item.shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif item.shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif item.shape == "triangle":
        pen.polygon([(x, top), (left, bottom), (right, bottom)], fill=fill)
    else:
        arm = half / 3
        pen.rectangle((x - arm, top, x + arm, bottom), fill=fill)
        pen.rectangle((left, y - arm, right, y + arm), fill=fill)
