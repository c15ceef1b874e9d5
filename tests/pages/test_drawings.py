"""A drawing as a file and on a page: readable, small, and without anything that runs."""

import io
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from fusion_bench_nufilt.pages import charts
from fusion_bench_nufilt.pages.page import templates
from fusion_bench_nufilt.pages.pictures import draw, for_page, save_picture
from fusion_bench_nufilt.pages.theme import CONFIG
from tests.pages.test_charts import KINDS, LAYERS, curves, heat_map


@pytest.fixture(scope="module")
def drawings():
    return {kind: draw(chart) for kind, chart in KINDS.items()}


def test_every_kind_is_valid_and_becomes_a_picture_of_300_dots_per_printed_inch(tmp_path, drawings):
    for kind, svg in drawings.items():
        KINDS[kind].to_dict()  # raises where Vega-Lite would not take it
        save_picture(svg, tmp_path / "chart.png", tmp_path / "chart.pdf")
        picture = Image.open(io.BytesIO((tmp_path / "chart.png").read_bytes()))
        assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.01)
        width, height = (
            float(re.search(rf'{side}="(\d+)"', svg)[1]) for side in ("width", "height")
        )
        assert picture.size == pytest.approx((width / 96 * 300, height / 96 * 300), abs=2)
        assert picture.mode == "P"
        assert len(picture.convert("L").getcolors()) > 10  # something is drawn
        assert (tmp_path / "chart.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chart.pdf", "chart.png"]


def words_of(svg):
    return [text for text in re.findall(r">([^<>]+)</(?:text|tspan)>", svg) if text.strip()]


def test_the_picture_of_a_page_has_all_words_of_the_file_and_is_smaller(drawings):
    for svg in drawings.values():
        page = for_page(svg, "")
        assert words_of(page) == words_of(svg)
        assert len(page) < 0.8 * len(svg)


def test_a_point_has_its_name_as_title():
    rows = [{"panel": "norm", "layer": layer, "y": 1.25} for layer in LAYERS]
    assert re.findall("<title>(.*?)</title>", for_page(draw(charts.by_depth(rows)), "")) == [
        f"{layer}: 1.25" for layer in LAYERS
    ]
    svg = for_page(draw(charts.lines(curves({"<i>": [1.0, 2.0]}), "step", "score")), "")
    assert "<title>&lt;i&gt;, step 2: 2</title>" in svg


def test_two_drawings_of_a_page_name_their_parts_differently():
    """An id is one for the whole page: the second scale of colours would be the first one's."""
    drawings = []
    for sentence in ("One.", "Another.", "One."):
        drawings.append(for_page(draw(heat_map([[1.0]], ["r"], ["t"])), sentence))
    assert drawings[2] == drawings[0]  # the same numbers make the same page
    names = [set(re.findall(r' id="([^"]*)"', drawing)) for drawing in drawings]
    assert names[0]
    assert names[0].isdisjoint(names[1])
    for drawing, own in zip(drawings, names, strict=True):
        assert set(re.findall(r"url\(#([^)]*)\)", drawing)) <= own


def test_what_is_ink_in_a_drawing_has_another_colour_on_a_dark_page(drawings):
    css = templates().get_template("page.css").render().lower()
    fixed = {"white", "black", "none", "transparent", "#7d838c"}  # on cells, and between both
    for kind in ("lines", "dots", "by depth"):
        for name, colour in re.findall(r'(fill|stroke)="([^"]*)"', for_page(drawings[kind], "")):
            if colour.startswith("#") and len(set(re.findall("..", colour[1:]))) > 1:
                continue  # a colour
            assert colour in fixed or f'[{name}="{colour.lower()}"]' in css, (kind, name, colour)
    for key in ("labelColor", "titleColor", "domainColor", "gridColor"):
        assert f'"{CONFIG["axis"][key]}"' in css


def test_a_drawing_is_xml_whatever_its_names():
    name = '</ScRiPt ><svg onload="document.title=1">&<!--'
    svg = for_page(draw(charts.lines(curves({name: [1.0, 2.0], "b": [1.0, 2.0]}), name, name)), "")
    root = ElementTree.fromstring(svg)
    assert not any("onload" in element.attrib for element in root.iter())
    assert any(name in (element.text or "") for element in root.iter())
