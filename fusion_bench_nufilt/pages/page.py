"""A page: one file that needs no network, made from one of the ``templates``."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion_bench_nufilt.utils.files import counted, printable

from .metrics import METRICS
from .pictures import for_page
from .tables import number_table

PAGE = "index.html"
#: The content of ``layers.csv`` beside the file that a page is made of, if there is one.
Layers = pd.DataFrame | None


class Outputs(NamedTuple):
    """The files that are made from the content of a folder."""

    page: str
    pictures: Mapping[str, str | None]  # drawings by name; None removes an old picture
    texts: Mapping[str, str] = {}


def render_page(template: str, **content: Any) -> str:
    """Fill a template; the page has its style and its pictures inside, and no script."""
    return templates().get_template(template).render(content)


def sentences(template: str, **content: Any) -> list[str]:
    """Fill a template of text, and return its paragraphs, each in one line."""
    # This is no HTML; but a name of several lines could begin a paragraph of its own.
    environment = templates().overlay(autoescape=False, finalize=_in_one_line)
    text = environment.get_template(template).render(content)
    paragraphs = [paragraph.strip().replace("\n", " ") for paragraph in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph]


@cache
def templates() -> Environment:
    """Return the templates, which escape all that they are given; a value that is missing is an
    error.
    """
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["metrics"] = METRICS
    environment.filters["for_page"] = for_page
    environment.filters["count"] = counted
    environment.filters["number_table"] = number_table
    environment.filters["table"] = _table
    environment.filters["ranges"] = _ranges
    environment.filters["indented"] = _indented
    return environment


def _table(rows: Mapping[str, Any], first: str, titles: Mapping[str, str]) -> pd.DataFrame:
    """Return a row for each name, below the titles of fields; ``a.b`` is the field b of the field
    a.
    """
    frame = pd.json_normalize([{**row, first: name} for name, row in rows.items()])
    return frame.reindex(columns=[first, *titles]).rename(columns=dict(titles))


def _indented(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text such as ``42-51, 60``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    words = []
    for members in ranges:
        if len(members) == 1:
            words.append(str(members[0]))
        else:
            words.append(f"{members[0]}-{members[-1]}")
    return ", ".join(words)


def _in_one_line(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
