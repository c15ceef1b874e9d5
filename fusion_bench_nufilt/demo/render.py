"""Draw small pictures from stamps: a pen places them, and :func:`paint` colours the result.

A *mask*, a float32 array (32, 32) in [0, 1], says where there is ink on the background. The class
of a picture depends on its mask or, in the task about colours, on its ink.
"""

import math
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
    width = right - left
    height = bottom - top
    sheet = Image.new("L", (math.ceil(width), math.ceil(height)))
    # PIL begins a text at its origin, and the ink of a letter at (left, top) from there.
    ImageDraw.Draw(sheet).text((-left, -top), text, fill=255, font=font)
    zoom = STAMP / max(width, height)
    zoomed_width = max(1, round(width * zoom))
    zoomed_height = max(1, round(height * zoom))
    sheet = sheet.resize((zoomed_width, zoomed_height))
    stamp = Image.new("L", (STAMP, STAMP))
    margin_x = (STAMP - zoomed_width) // 2
    margin_y = (STAMP - zoomed_height) // 2
    stamp.paste(sheet, (margin_x, margin_y))
    return stamp


@cache
def shape_stamp(name: str) -> Image.Image:
    """Draw one of :data:`SHAPES`, filled."""
    # It is drawn four times as large, for smooth edges: [-1, 1] becomes [0, 4 STAMP].
    stamp = Image.new("L", (4 * STAMP, 4 * STAMP))
    half = 2 * STAMP
    outline = [((x + 1) * half, (y + 1) * half) for x, y in SHAPES[name]]
    ImageDraw.Draw(stamp).polygon(outline, fill=255)
    return stamp.resize((STAMP, STAMP), Image.Resampling.BOX)


def handwriting_stamp(scan: NDArray[np.floating]) -> Image.Image:
    """Enlarge a scan of 8 by 8 grey values from 0 to 16, as in scikit-learn's `load_digits`."""
    grey = Image.fromarray(np.rint(scan * (255 / 16)).astype(np.uint8))
    return grey.resize((STAMP, STAMP), Image.Resampling.BICUBIC)


def polygon(corners: int, *radii: float, start: float = -math.pi / 2) -> list[Point]:
    """Return corners around the origin, whose distances from it take turns among the radii."""
    outline = []
    for i in range(corners):
        radius = radii[i % len(radii)]
        angle = start + 2 * math.pi * i / corners
        outline.append((radius * math.cos(angle), radius * math.sin(angle)))
    return outline


def heart() -> list[Point]:
    outline = []
    for i in range(60):
        t = 2 * math.pi * i / 60
        x = math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        outline.append((x, -y / 17))
    return outline


def moon() -> list[Point]:
    outline = []
    for degrees in range(50, 311, 10):  # the outer edge
        angle = math.radians(degrees)
        outline.append((0.3 + math.cos(angle), math.sin(angle)))
    for degrees in range(290, 69, -10):  # and back along the inner one
        angle = math.radians(degrees)
        outline.append((0.62 + 0.8 * math.cos(angle), 0.8 * math.sin(angle)))
    return outline


SHAPES: dict[str, list[Point]] = {
    "circle": polygon(60, 0.9),
    "triangle": polygon(3, 1.0),
    "square": polygon(4, 1.0, start=math.pi / 4),
    "star": polygon(10, 1.0, 0.38),
    "heart": heart(),
    "moon": moon(),
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
        if at is None:
            play = min((SIDE - width) / 2, 2.0)
            x, y = SIDE / 2 + self.rng.uniform(-play, play, size=2)
        else:
            x, y = at
        # The affine map from a pixel of the picture to that of the stamp, as PIL wants it: it turns
        # and zooms, and takes (x, y) to the middle of the stamp.
        zoom = STAMP / width
        c = zoom * math.cos(tilt)
        s = zoom * math.sin(tilt)
        middle = STAMP / 2
        shift_x = middle - c * x + s * y
        shift_y = middle - s * x - c * y
        inverse = (c, -s, shift_x, s, c, shift_y)
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
        shift_u, shift_v = self.rng.uniform(0, 1, size=2)
        c = math.cos(tilt)
        s = math.sin(tilt)
        u = (c * x + s * y) / period + shift_u
        v = (c * y - s * x) / period + shift_v
        return u.astype(np.float32), v.astype(np.float32)


def blobs(rng: np.random.Generator, n: int, cells: int, channels: int) -> NDArray[np.float32]:
    """Return smooth noise (n, 32, 32, channels) in [0, 1], interpolated between `cells`² random
    values.
    """
    knots = rng.random((n, cells, cells, channels), dtype=np.float32)
    positions = np.linspace(0, cells - 1, SIDE)  # of the pixels, in cells
    distances = np.abs(positions[:, None] - np.arange(cells))
    weights = np.maximum(0, 1 - distances).astype(np.float32)  # linear interpolation
    return np.einsum("yi,nijc,xj->nyxc", weights, knots, weights, optimize=True)


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
        # A light grey and a dark one (n, 2), each with a tint (n, 3) that leaves its mean.
        greys = rng.uniform(0.65, 0.9, size=(n, 2)) * (1, 0.3)
        greys[:, 1] += rng.uniform(-0.1, 0.1, size=n)
        tints = rng.uniform(-0.15, 0.15, size=(2, n, 3))
        tints -= tints.mean(axis=2, keepdims=True)
        light = greys[:, 0, None]
        dark = greys[:, 1, None]
        if bright:
            ground = dark + tints[0]
            ink = light + tints[1]
        else:
            ground = light + tints[0]
            ink = dark + tints[1]
    else:
        ground = (ink + rng.uniform(0.35, 0.65, size=(n, 3))) % 1
    ground = ground[:, None, None, :] + 0.3 * (blobs(rng, n, 4, 3) - 0.5)
    ink = ink[:, None, None, :] + 0.1 * (blobs(rng, n, 3, 1) - 0.5)
    cover = masks[..., None]
    picture = ground * (1 - cover) + ink * cover
    noise_level = rng.uniform(0.01, 0.05, size=(n, 1, 1, 1))
    picture += noise_level * rng.standard_normal(picture.shape)
    return np.rint(255 * picture.clip(0, 1)).astype(np.uint8, order="C")
