"""The eight tasks of the demo: how each class is drawn, and how it is named."""

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .render import (
    DRAWINGS,
    SHAPES,
    SIDE,
    Mask,
    Pen,
    blobs,
    handwriting_stamp,
    paint,
    shape_stamp,
    text_stamp,
)


@dataclass(frozen=True)
class Task:
    """Classes, the sentence that names one, and how to draw one."""

    classes: tuple[str, ...]
    template: str
    draw: Callable[[Pen, str], Mask]
    bright: bool = False
    ink: Callable[[Pen, str], tuple[float, float, float]] | None = None

    def prompts(self) -> list[str]:
        """Return a sentence for each class, in the order of the labels."""
        return [self.template.format(name) for name in self.classes]


@cache
def _handwriting(held_out: bool) -> dict[str, list[Image.Image]]:
    """Return real digits by class; every fifth scan of a digit is held out for testing."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    stamps: dict[str, list[Image.Image]] = {name: [] for name in DIGITS}
    for digit, name in enumerate(DIGITS):
        for i, scan in enumerate(scans.images[scans.target == digit]):
            is_for_testing = i % 5 == 0
            if is_for_testing == held_out:
                stamps[name].append(handwriting_stamp(scan))
    return stamps


def draw_digit(pen: Pen, name: str) -> Mask:
    stamps = _handwriting(pen.held_out)[name]
    stamp = stamps[pen.turn % len(stamps)]  # in turn, since there are few
    return pen.place(stamp, size=(28, 31), sway=8)


def draw_letter(pen: Pen, name: str) -> Mask:
    typeface = pen.pick("DejaVuSans-Bold", "DejaVuSerif-Bold", "STIXGeneralBol")
    return pen.place(text_stamp(name.upper(), typeface), size=(22, 27), sway=5)


def draw_typeface(pen: Pen, name: str) -> Mask:
    letter = pen.pick("a", "e", "g", "k", "n", "r")
    return pen.place(text_stamp(letter, TYPEFACES[name]), size=(26, 31), sway=2)


def draw_shape(pen: Pen, name: str) -> Mask:
    return pen.place(shape_stamp(name), size=(20, 27), sway=30)


def draw_any_shape(pen: Pen, name: str) -> Mask:
    return draw_shape(pen, pen.pick(*SHAPES))


def draw_count(pen: Pen, name: str) -> Mask:
    stamp = shape_stamp(pen.pick("circle", "square"))
    centres: list[NDArray[np.floating]] = []
    mask = np.zeros((SIDE, SIDE), dtype=np.float32)
    while len(centres) <= NUMBERS.index(name):
        centre = pen.rng.uniform(5, SIDE - 5, size=2)
        distances = [np.hypot(*(centre - other)) for other in centres]
        # A shape that would touch another one is drawn elsewhere.
        if all(distance > 10.5 for distance in distances):
            centres.append(centre)
            shape = pen.place(stamp, (8, 9.5), sway=45, at=tuple(centre))
            mask = np.maximum(mask, shape)
    return mask


def draw_arrow(pen: Pen, name: str) -> Mask:
    stamp = shape_stamp(pen.pick("arrow", "chevron", "dart"))
    angle = 45 * DIRECTIONS.index(name)  # the stamps point to the right
    return pen.place(stamp, size=(20, 28), angle=angle, sway=10)


def mix_colour(pen: Pen, name: str) -> tuple[float, float, float]:
    hue, saturation, value = COLOURS[name]  # the hue in degrees
    hue = (hue + pen.rng.uniform(-8, 8)) / 360 % 1
    saturation *= pen.rng.uniform(0.8, 1)
    value *= pen.rng.uniform(0.85, 1)
    return colorsys.hsv_to_rgb(hue, saturation, value)


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = DIGITS[1:5]
DIRECTIONS = ("right", "up right", "up", "up left", "left", "down left", "down", "down right")
LETTERS = tuple("abcdefghkmrstxyz")
TYPEFACES = DRAWINGS["typefaces"]
COLOURS = DRAWINGS["colours"]


# A texture is an array (32, 32) that says where there is ink.
Texture = NDArray[np.bool_]


def draw_bricks(pen: Pen) -> Texture:
    u, v = pen.grid((9, 14), sway=15)
    row = 2 * v
    column = u + 0.5 * np.floor(row % 2)  # every other row is shifted by half a brick
    return (row % 1 < 0.25) | (column % 1 < 0.13)


def draw_zigzag(pen: Pen) -> Texture:
    u, v = pen.grid((8, 11))
    height = 1.6 * v + 1.2 * np.abs(u % 1 - 0.5)
    return height % 1 < 0.5


def draw_rings(pen: Pen) -> Texture:
    u, v = pen.grid((5, 8))
    radius = np.hypot(u - u.mean(), v - v.mean())
    return (radius + pen.rng.random()) % 1 < 0.5


def draw_rays(pen: Pen) -> Texture:
    u, v = pen.grid((8, 8))
    spokes = pen.rng.integers(5, 9)
    angle = np.arctan2(v - v.mean(), u - u.mean())
    return np.sin(spokes * angle) > 0


def draw_clouds(pen: Pen) -> Texture:
    return blobs(pen.rng, 1, 6, 1)[0, :, :, 0] > 0.5


def draw_speckles(pen: Pen) -> Texture:
    return pen.rng.random((SIDE, SIDE)) < 0.4


def lattice(pen: Pen) -> tuple[Mask, Mask]:
    """Return the coordinates of all pixels in the cell of a lattice that they are in, from -0.5 to
    0.5.
    """
    u, v = pen.grid((6, 10))
    return u % 1 - 0.5, v % 1 - 0.5


def draw_stripes(pen: Pen) -> Texture:
    u, _ = lattice(pen)
    return np.abs(u) < 0.25


def draw_checks(pen: Pen) -> Texture:
    u, v = lattice(pen)
    return u * v > 0


def draw_dots(pen: Pen) -> Texture:
    u, v = lattice(pen)
    return np.hypot(u, v) < 0.3


def draw_mesh(pen: Pen) -> Texture:
    u, v = lattice(pen)
    return (np.abs(u) > 0.36) | (np.abs(v) > 0.36)


TEXTURES: dict[str, Callable[[Pen], Texture]] = {
    "striped": draw_stripes,
    "checked": draw_checks,
    "dotted": draw_dots,
    "meshed": draw_mesh,
    "bricked": draw_bricks,
    "zigzag": draw_zigzag,
    "ringed": draw_rings,
    "radiant": draw_rays,
    "clouded": draw_clouds,
    "speckled": draw_speckles,
}


def draw_texture(pen: Pen, name: str) -> Mask:
    return TEXTURES[name](pen).astype(np.float32)


# The order is that of the reports, and decides on the random stream of each task.
TASKS: dict[str, Task] = {
    "digits": Task(DIGITS, "a handwritten digit {}", draw_digit),
    "letters": Task(LETTERS, "a printed letter {}", draw_letter, bright=True),
    "typefaces": Task(tuple(TYPEFACES), "a letter set in {} type", draw_typeface),
    # The first eight; the other three shapes are arrows.
    "shapes": Task(tuple(SHAPES)[:8], "the shape of a {}", draw_shape, bright=True),
    "textures": Task(tuple(TEXTURES), "a {} pattern", draw_texture),
    "colours": Task(tuple(COLOURS), "something painted {}", draw_any_shape, ink=mix_colour),
    "counts": Task(NUMBERS, "a group of {}", draw_count, bright=True),
    "arrows": Task(DIRECTIONS, "an arrow pointing {}", draw_arrow),
}


def render(
    task: str, n: int, *, held_out: bool, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw `n` pictures (n, 32, 32, 3) of a task, whose classes take turns, and return them with
    their labels (n,).

    Training pictures and held-out ones have other random streams, and other scans of handwriting.
    """
    spec = TASKS[task]
    rng = np.random.default_rng([seed, list(TASKS).index(task), held_out])
    pen = Pen(rng, held_out)
    labels = np.arange(n) % len(spec.classes)
    masks = np.zeros((n, SIDE, SIDE), dtype=np.float32)
    inks = None
    if spec.ink is not None:
        inks = np.zeros((n, 3), dtype=np.float32)
    for i, label in enumerate(labels):
        name = spec.classes[label]
        pen.turn = i // len(spec.classes)
        masks[i] = spec.draw(pen, name)
        if spec.ink is not None and inks is not None:
            inks[i] = spec.ink(pen, name)
    pictures = paint(rng, masks, bright=spec.bright, ink=inks)
    return pictures, labels
