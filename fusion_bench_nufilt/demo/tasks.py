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
    stamps = {}
    for digit, name in enumerate(DIGITS):
        images = scans.images[scans.target == digit]
        stamps[name] = [
            handwriting_stamp(scan) for i, scan in enumerate(images) if (i % 5 == 0) == held_out
        ]
    return stamps


def draw_digit(pen: Pen, name: str) -> Mask:
    scans = _handwriting(pen.held_out)[name]  # in turn, since there are few
    return pen.place(scans[pen.turn % len(scans)], size=(28, 31), sway=8)


def draw_letter(pen: Pen, name: str) -> Mask:
    typeface = pen.pick("DejaVuSans-Bold", "DejaVuSerif-Bold", "STIXGeneralBol")
    return pen.place(text_stamp(name.upper(), typeface), size=(22, 27), sway=5)


def draw_typeface(pen: Pen, name: str) -> Mask:
    return pen.place(text_stamp(pen.pick(*"aegknr"), TYPEFACES[name]), size=(26, 31), sway=2)


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
        if all(np.hypot(*(centre - other)) > 10.5 for other in centres):
            centres.append(centre)
            mask = np.maximum(mask, pen.place(stamp, (8, 9.5), sway=45, at=tuple(centre)))
    return mask


def draw_arrow(pen: Pen, name: str) -> Mask:
    stamp = shape_stamp(pen.pick("arrow", "chevron", "dart"))
    return pen.place(stamp, size=(20, 28), angle=45 * DIRECTIONS.index(name), sway=10)


def mix_colour(pen: Pen, name: str) -> tuple[float, float, float]:
    hue, saturation, value = COLOURS[name]
    turned = (hue + pen.rng.uniform(-8, 8)) / 360 % 1
    return colorsys.hsv_to_rgb(
        turned, saturation * pen.rng.uniform(0.8, 1), value * pen.rng.uniform(0.85, 1)
    )


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMBERS = DIGITS[1:5]
DIRECTIONS = ("right", "up right", "up", "up left", "left", "down left", "down", "down right")
TYPEFACES, COLOURS = DRAWINGS["typefaces"], DRAWINGS["colours"]


def _bricks(pen: Pen) -> NDArray[np.bool_]:
    u, v = pen.grid((9, 14), sway=15)
    row = 2 * v
    return ((row % 1) < 0.25) | (((u + 0.5 * np.floor(row % 2)) % 1) < 0.13)


def _zigzag(pen: Pen) -> NDArray[np.bool_]:
    u, v = pen.grid((8, 11))
    return ((1.6 * v + 1.2 * np.abs(u % 1 - 0.5)) % 1) < 0.5


def _rings(pen: Pen) -> NDArray[np.bool_]:
    u, v = pen.grid((5, 8))
    return (np.hypot(u - u.mean(), v - v.mean()) + pen.rng.random()) % 1 < 0.5


def _rays(pen: Pen) -> NDArray[np.bool_]:
    u, v = pen.grid((8, 8))
    spokes = pen.rng.integers(5, 9)
    return np.sin(spokes * np.arctan2(v - v.mean(), u - u.mean())) > 0


def _lattice(pen: Pen, draw: Callable[[Mask, Mask], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    u, v = pen.grid((6, 10))
    return draw(u % 1 - 0.5, v % 1 - 0.5)


TEXTURES: dict[str, Callable[[Pen], NDArray[np.bool_]]] = {
    "striped": lambda pen: _lattice(pen, lambda u, v: np.abs(u) < 0.25),
    "checked": lambda pen: _lattice(pen, lambda u, v: u * v > 0),
    "dotted": lambda pen: _lattice(pen, lambda u, v: np.hypot(u, v) < 0.3),
    "meshed": lambda pen: _lattice(pen, lambda u, v: (np.abs(u) > 0.36) | (np.abs(v) > 0.36)),
    "bricked": _bricks,
    "zigzag": _zigzag,
    "ringed": _rings,
    "radiant": _rays,
    "clouded": lambda pen: blobs(pen.rng, 1, 6, 1)[0, :, :, 0] > 0.5,
    "speckled": lambda pen: pen.rng.random((SIDE, SIDE)) < 0.4,
}

TASKS: dict[str, Task] = {
    "digits": Task(DIGITS, "a handwritten digit {}", draw_digit),
    "letters": Task(tuple("abcdefghkmrstxyz"), "a printed letter {}", draw_letter, bright=True),
    "typefaces": Task(tuple(TYPEFACES), "a letter set in {} type", draw_typeface),
    "shapes": Task(
        tuple(SHAPES)[:8], "the shape of a {}", draw_shape, bright=True
    ),  # the other three are arrows
    "textures": Task(
        tuple(TEXTURES), "a {} pattern", lambda pen, name: TEXTURES[name](pen).astype(np.float32)
    ),
    "colours": Task(tuple(COLOURS), "something painted {}", draw_any_shape, ink=mix_colour),
    "counts": Task(NUMBERS, "a group of {}", draw_count, bright=True),
    "arrows": Task(DIRECTIONS, "an arrow pointing {}", draw_arrow),
}
"""The tasks in the order in which they are reported."""


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
    inks = np.zeros((n, 3), dtype=np.float32)
    for i, label in enumerate(labels):
        name = spec.classes[label]
        pen.turn = i // len(spec.classes)
        masks[i] = spec.draw(pen, name)
        if spec.ink:
            inks[i] = spec.ink(pen, name)
    return paint(rng, masks, bright=spec.bright, ink=inks if spec.ink else None), labels
