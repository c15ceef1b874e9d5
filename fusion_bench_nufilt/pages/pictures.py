"""A chart as an SVG drawing, and what is made of it: files for people to print, and the picture on
a page, which holds no script.
"""

import io
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
    becomes its ``<title>``, and what its page says is left out.
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
    for element in root.iter():
        _adapt(element, ids)
    width = float(root.attrib.pop("width"))
    del root.attrib["height"]
    # On a narrow screen it shrinks as long as its words can be read, and then scrolls.
    root.set("style", f"max-width: {width:.0f}px; min-width: {0.7 * width:.0f}px")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _adapt(element: ElementTree.Element, ids: Mapping[str, str]) -> None:
    attributes = element.attrib
    if element.tag == f"{{{_SVG}}}path" and attributes.get("role") == "graphics-symbol":
        title = ElementTree.SubElement(element, f"{{{_SVG}}}title")
        title.text = attributes.get("aria-label")
    for name in _DROPPED:
        attributes.pop(name, None)
    for name, value in attributes.items():
        if name == "id":
            attributes[name] = ids[value]
        elif value.startswith("url(#"):
            attributes[name] = f"url(#{ids[value[5:-1]]})"
