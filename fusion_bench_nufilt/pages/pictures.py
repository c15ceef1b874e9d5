"""A chart as an SVG drawing, and what is made of it: files for people to print, and the picture on
a page, which holds no script.
"""

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree
from zlib import crc32

import vl_convert
from altair.typing import ChartType
from markupsafe import Markup
from PIL import Image

from fusion_bench_nufilt.utils.files import atomic_file

from .theme import chart_definition

_CSS_DPI = 96  # pixels of a drawing in an inch
_PRINT_DPI = 300
_SVG = "http://www.w3.org/2000/svg"
_PATH = f"{{{_SVG}}}path"
#: What shows nothing on a page, or is said once by its style sheet.
_DROPPED = (
    "aria-hidden",
    "aria-label",
    "aria-roledescription",
    "class",
    "font-family",
    "pointer-events",
    "role",
    "stroke-miterlimit",
)
#: What the parts of a group inherit, so that it can be said once of the group.
_INHERITED = (
    "fill",
    "font-size",
    "font-weight",
    "stroke",
    "stroke-dasharray",
    "stroke-width",
    "text-anchor",
)
#: More digits of a place than are seen.
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")
_EMPTY_PATH = ("", "M0,0h0v0h0Z")


def draw(chart: ChartType) -> str:
    """Return a chart as SVG, which takes most of the time that a picture takes."""
    svg: str = vl_convert.vegalite_to_svg(chart_definition(chart))
    return svg


def save_picture(svg: str, *paths: Path) -> None:
    """Write a drawing as PNG, with 300 dots per inch of its printed size, or PDF, as each file's
    name says, atomically.
    """
    for path in paths:
        if path.suffix == ".pdf":
            content = vl_convert.svg_to_pdf(svg)
        else:
            content = _with_palette(vl_convert.svg_to_png(svg, scale=_PRINT_DPI / _CSS_DPI))
        with atomic_file(path) as temporary:
            temporary.write_bytes(content)


def _with_palette(png: bytes) -> bytes:
    """Return a picture with 256 colours, which is a fifth as large: charts have few of them."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True, dpi=(_PRINT_DPI, _PRINT_DPI))
    return stream.getvalue()


def for_page(svg: str, sentence: str) -> Markup:
    """Return a drawing for a page, on which no other one has the same sentence: what names a point
    becomes its ``<title>``, and what changes nothing that is seen is left out.
    """
    # Names are escaped by the parser's own writer; the drawing itself is Vega's.
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    # Two drawings of a page may not have the same names for what they refer to, and Vega counts
    # them through the whole process.
    ids: dict[str, str] = {}
    for element in root.iter():
        if "id" in element.attrib:
            ids[element.attrib["id"]] = f"d{crc32(sentence.encode()):08x}-{len(ids)}"
    _shorten(root, ids)
    width = float(root.attrib.pop("width"))
    del root.attrib["height"], root.attrib["version"]
    # On a narrow screen it shrinks as long as its words can be read, and then scrolls.
    root.set("style", f"max-width: {width:.0f}px; min-width: {0.7 * width:.0f}px")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _shorten(element: ElementTree.Element, ids: Mapping[str, str]) -> None:
    title = None
    if element.tag == _PATH and element.get("role") == "graphics-symbol":
        title = element.get("aria-label")
    for name in _DROPPED:
        element.attrib.pop(name, None)
    if element.get("opacity") == "1":
        del element.attrib["opacity"]
    for name, value in element.attrib.items():
        if name == "id":
            value = ids[value]
        elif value.startswith("url(#"):
            value = f"url(#{ids[value[5:-1]]})"
        else:
            value = _LONG_NUMBER.sub(_rounded, value)
        element.set(name, value)
    for child in list(element):
        _shorten(child, ids)
        if _is_unseen(child):
            element.remove(child)
    if len(element) > 1:
        _say_once(element)
    if title is not None:
        ElementTree.SubElement(element, f"{{{_SVG}}}title").text = title


def _rounded(number: re.Match[str]) -> str:
    value = float(number[0])
    if not math.isfinite(value):
        return number[0]
    return f"{round(value, 2):g}" if abs(value) < 1e4 else number[0]


def _is_unseen(element: ElementTree.Element) -> bool:
    """Tell whether a path has no line, or a group nothing in it."""
    if element.tag == _PATH:
        return element.get("d") in _EMPTY_PATH
    return element.tag == f"{{{_SVG}}}g" and len(element) == 0


def _say_once(group: ElementTree.Element) -> None:
    """Give a group what all of its parts say alike."""
    for name in _INHERITED:
        values = {part.get(name) for part in group}
        if len(values) == 1 and None not in values:
            group.set(name, values.pop() or "")
            for part in group:
                del part.attrib[name]
