"""A page: one file that needs no network, made from one of the ``templates``."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any, NamedTuple

import pandas as pd
import vl_convert
from altair.typing import ChartType
from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion_bench_nufilt.utils.files import counted, printable

from .metrics import METRICS, shown_number
from .theme import CONFIG, cell_widths, panels_of

PAGE = "index.html"
Tables = Mapping[str, pd.DataFrame]  # the content of CSV files, by name


class Outputs(NamedTuple):
    """The files that are made from the content of a folder."""

    page: str
    charts: Mapping[str, ChartType | None]  # by picture; None removes an old picture
    texts: Mapping[str, str] = {}


def render_page(template: str, **content: Any) -> str:
    """Fill a template, with all scripts and styles inside; the browser runs no others."""
    scripts = [_vega(), templates().get_template("page.js").render()]
    return templates().get_template(template).render(content, scripts=scripts)


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
    # Jinja would sort the keys, and spaces between them would make pages longer.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals["escape"] = escape
    environment.globals["metrics"] = METRICS
    environment.globals["theme"] = CONFIG
    environment.filters["panels"] = panels_of
    environment.filters["count"] = counted
    environment.filters["cell_widths"] = cell_widths
    environment.filters["number_columns"] = _number_columns
    environment.filters["number"] = shown_number
    environment.filters["table"] = _table
    environment.filters["ranges"] = _ranges
    environment.filters["indented"] = _indented
    # A page's policy names its own scripts by their digests, and the browser runs no others.
    environment.filters["sha256"] = _sha256
    return environment


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, made once, since that takes seconds."""
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # A browser ends a script at the first such text, also where it is inside a string.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _table(rows: Mapping[str, Any], first: str, titles: Mapping[str, str]) -> pd.DataFrame:
    """Return a row for each name, below the titles of fields; ``a.b`` is the field b of the field
    a.
    """
    frame = pd.json_normalize([{**row, first: name} for name, row in rows.items()])
    return frame.reindex(columns=[first, *titles]).rename(columns=dict(titles))


def _indented(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _sha256(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _number_columns(frame: pd.DataFrame) -> list[str]:
    columns = []
    for position, name in enumerate(frame.columns):
        if not any(isinstance(value, str) for value in frame.iloc[:, position]):
            columns.append(name)
    return columns


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
