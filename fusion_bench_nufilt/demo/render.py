"""Draw small pictures from stamps: a pen places them, and :func:`paint` colours the result.

A *mask*, a float32 array (32, 32) in [0, 1], says where there is ink on the background. The class
of a picture depends on its mask or, in the task about colours, on its ink.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE = 32  # width and height of a picture, in pixels
STAMP = 64  # width and height of a stamp, twice its size in a picture, for smooth edges

Mask = NDArray[np.float32]
Point = tuple[float, float]
Range = tuple[float, float]

DRAWINGS = yaml.safe_load(Path(__file__).with_name("drawings.yaml").read_text(encoding="utf-8"))
_FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def text_stamp(text: str, typeface: str) -> Image.Image:
    """Draw a text in a typeface of matplotlib's, as large as a stamp allows."""
    font = ImageFont.truetype(_FONTS / f"{typeface}.ttf", size=STAMP)
    left, top, right, bottom = font.getbbox(text)
    width, height = right - left, bottom - top
    sheet = Image.new("L", (math.ceil(width), math.ceil(height)))
    ImageDraw.Draw(sheet).text((-left, -top), text, fill=255, font=font)
    zoom = STAMP / max(width, height)
    sheet = sheet.resize((max(1, round(width * zoom)), max(1, round(height * zoom))))
    stamp = Image.new("L", (STAMP, STAMP))
    stamp.paste(sheet, ((STAMP - sheet.width) // 2, (STAMP - sheet.height) // 2))
    return stamp


@cache
def shape_stamp(name: str) -> Image.Image:
    """Draw one of :data:`SHAPES`, filled."""
    stamp = Image.new("L", (4 * STAMP, 4 * STAMP))
    pixel = [((x + 1) * 2 * STAMP, (y + 1) * 2 * STAMP) for x, y in SHAPES[name]]
    ImageDraw.Draw(stamp).polygon(pixel, fill=255)
    return stamp.resize((STAMP, STAMP), Image.Resampling.BOX)


def handwriting_stamp(scan: NDArray[np.floating]) -> Image.Image:
    """Enlarge a scan of 8 by 8 grey values from 0 to 16, as in scikit-learn's `load_digits`."""
    grey = Image.fromarray(np.rint(scan * (255 / 16)).astype(np.uint8))
    return grey.resize((STAMP, STAMP), Image.Resampling.BICUBIC)


def _ring(corners: int, radius: Callable[[int], float], start: float = -math.pi / 2) -> list[Point]:
    angles = [start + 2 * math.pi * i / corners for i in range(corners)]
    return [(radius(i) * math.cos(a), radius(i) * math.sin(a)) for i, a in enumerate(angles)]


def _heart() -> list[Point]:
    turns = [2 * math.pi * i / 60 for i in range(60)]
    heights = [sum(a * math.cos(k * t) for k, a in enumerate((0, 13, -5, -2, -1))) for t in turns]
    return [(math.sin(t) ** 3, -y / 17) for t, y in zip(turns, heights, strict=True)]


def _moon() -> list[Point]:
    outer = [math.radians(d) for d in range(50, 311, 10)]
    inner = [math.radians(d) for d in range(290, 69, -10)]
    edge = [(0.3 + math.cos(a), math.sin(a)) for a in outer]
    return edge + [(0.62 + 0.8 * math.cos(a), 0.8 * math.sin(a)) for a in inner]


SHAPES: dict[str, list[Point]] = {
    "circle": _ring(60, lambda i: 0.9),
    "triangle": _ring(3, lambda i: 1.0),
    "square": _ring(4, lambda i: 1.0, start=math.pi / 4),
    "star": _ring(10, lambda i: 0.38 if i % 2 else 1.0),
    "heart": _heart(),
    "moon": _moon(),
    **DRAWINGS["shapes"],
}
"""The outlines of shapes in the square [-1, 1]², where y points down."""


@dataclass
class Pen:
    """Draws one picture after another."""

    rng: np.random.Generator  # the only source of randomness
    held_out: bool = False  # for testing, with handwriting of its own
    turn: int = 0  # how often each class was drawn

    def pick(self, *choices: str) -> str:
        return choices[self.rng.integers(len(choices))]

    def place(
        self,
        stamp: Image.Image,
        size: Range,
        angle: float = 0.0,
        sway: float = 0.0,
        at: Point | None = None,
    ) -> Mask:
        """Return the mask of a stamp near the middle of the picture or `at` a pixel.

        Its width in pixels is drawn from `size`, and its counter-clockwise turn in degrees from
        `angle` ± `sway`.
        """
        width = self.rng.uniform(*size)
        tilt = math.radians(angle + self.rng.uniform(-sway, sway))
        play = min((SIDE - width) / 2, 2.0)
        x, y = at if at is not None else SIDE / 2 + self.rng.uniform(-play, play, size=2)
        zoom = STAMP / width
        c, s = zoom * math.cos(tilt), zoom * math.sin(tilt)
        middle = STAMP / 2
        inverse = (c, -s, middle - c * x + s * y, s, c, middle - s * x - c * y)
        placed = stamp.transform(
            (SIDE, SIDE), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR
        )
        return np.asarray(placed, dtype=np.float32) / np.float32(255)

    def grid(self, wavelength: Range, sway: float = 180.0) -> tuple[Mask, Mask]:
        """Return the coordinates (u, v) of all pixels, in periods, rotated and shifted at
        random.
        """
        tilt = math.radians(self.rng.uniform(-sway, sway))
        period = self.rng.uniform(*wavelength)
        y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) - SIDE / 2
        du, dv = self.rng.uniform(0, 1, size=2)
        u = (math.cos(tilt) * x + math.sin(tilt) * y) / period + du
        v = (math.cos(tilt) * y - math.sin(tilt) * x) / period + dv
        return u.astype(np.float32), v.astype(np.float32)


def blobs(rng: np.random.Generator, n: int, cells: int, channels: int) -> NDArray[np.float32]:
    """Return smooth noise (n, 32, 32, channels) in [0, 1], interpolated between `cells`² random
    values.
    """
    knots = rng.random((n, cells, cells, channels), dtype=np.float32)
    where = np.linspace(0, cells - 1, SIDE)
    hat = np.maximum(0, 1 - np.abs(where[:, None] - np.arange(cells))).astype(np.float32)
    return np.einsum("yi,nijc,xj->nyxc", hat, knots, hat, optimize=True)


def paint(
    rng: np.random.Generator, masks: Mask, *, bright: bool, ink: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Turn masks (n, 32, 32) into RGB pictures (n, 32, 32, 3): ink over a mottled background, with
    noise.

    The background is far from the colours `ink` (n, 3) in [0, 1]. Without them, colours are random,
    and the ink is brighter than the background if `bright`, or else darker.
    """
    n = len(masks)
    if ink is None:
        grey = rng.uniform(0.65, 0.9, size=(n, 2)) * (1, 0.3)
        grey[:, 1] += rng.uniform(-0.1, 0.1, size=n)
        tint = rng.uniform(-0.15, 0.15, size=(2, n, 3))
        tint -= tint.mean(axis=2, keepdims=True)
        ground, ink = (grey.T if not bright else grey.T[::-1])[..., None] + tint
    else:
        ground = (ink + rng.uniform(0.35, 0.65, size=(n, 3))) % 1
    ground = ground[:, None, None, :] + 0.3 * (blobs(rng, n, 4, 3) - 0.5)
    ink = ink[:, None, None, :] + 0.1 * (blobs(rng, n, 3, 1) - 0.5)
    cover = masks[..., None]
    picture = ground * (1 - cover) + ink * cover
    picture += rng.uniform(0.01, 0.05, size=(n, 1, 1, 1)) * rng.standard_normal(picture.shape)
    return np.rint(255 * picture.clip(0, 1)).astype(np.uint8, order="C")
