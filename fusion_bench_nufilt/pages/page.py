"""The parts of a page: text, sortable tables and charts. A page is one file that needs no network."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

import pandas as pd
import vl_convert
from altair.typing import ChartType
from typing_extensions import TypeIs

from .tables import Table
from .theme import definition

PAGE = "index.html"
Value = str | float | int | None
Tables = Mapping[str, pd.DataFrame]  # the content of CSV files, by name

#: Characters that could end a script element, or a line of JavaScript, even inside a string.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


@dataclass
class Page:
    """A title and the parts below it, in order."""

    title: str
    subtitle: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def words(self, text: str) -> None:
        self.parts.append(f"<p>{escape(text)}</p>")

    def bullets(self, sentences: Iterable[str]) -> None:
        self.parts.append(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in sentences)}</ul>")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Value]], digits: int = 2) -> None:
        """Write a table that a click on a header sorts; columns without a value are left out.

        Numbers have ``digits`` decimals, but one in a column of per cents.
        """
        columns = zip(header, zip(*rows, strict=True), strict=False)  # without rows there are none
        known = [(name, column) for name, column in columns if any(map(_known, column))]
        cells = ([_cell(value, 1 if name.endswith("%") else digits) for value in column] for name, column in known)
        self._rows([name for name, _ in known], map("".join, zip(*cells, strict=True)))

    def texts(self, table: Table) -> None:
        """Write a table with its title and notes; the best of a column is bold, the second best underlined."""
        self.heading(table.title)
        rows = table.rows("<b>{}</b>", "<u>{}</u>", escape)
        cells = (f"<td>{row[0]}</td>" + "".join(f'<td class="number">{text}</td>' for text in row[1:]) for row in rows)
        self._rows(list(table.texts.columns), cells)
        self.bullets(table.notes)

    def _rows(self, header: Sequence[str], rows: Iterable[str]) -> None:
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        self.parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def chart(self, chart: ChartType) -> None:
        """Draw a chart; one without panels is as wide as the page."""
        spec = definition(chart)
        if "layer" in spec or "mark" in spec:
            spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
        data = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPED)
        script = f'<script type="application/json">{data}</script>'
        self.parts.append(f'<div class="wide"><div class="chart"></div>{script}</div>')

    def configuration(self, contents: dict[str, Any]) -> None:
        """Write a section of folded JSON texts by title, for readers who want the details."""
        self.heading("Configuration")
        for title, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            self.parts.append(f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>")

    def render(self) -> str:
        """Return the whole page, with its scripts and styles inside; the browser runs no others."""
        page, style, script = (
            files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
        )
        scripts = [_vega(), script]
        digests = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
        return Template(page).substitute(
            policy=f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:",
            title=escape(self.title),
            subtitle=escape(self.subtitle),
            style=style,
            parts="\n".join(self.parts),
            scripts="\n".join(f"<script>{text}</script>" for text in scripts),
        )


class Files(NamedTuple):
    """The files that are made from the content of a folder."""

    page: Page
    charts: Mapping[str, ChartType | None]  # by picture; None removes an old picture
    texts: Mapping[str, str] = {}


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, made once, since that takes seconds."""
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _known(value: Value) -> TypeIs[str | float]:
    return value is not None and value == value  # not NaN


def _cell(value: Value, digits: int) -> str:
    if not _known(value):
        return '<td class="number" data-value="">-</td>'
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    form = ".2e" if 0 < abs(value) < 10**-digits else f".{digits}f"
    text = str(value) if isinstance(value, int) else f"{value:{form}}"
    return f'<td class="number" data-value="{value}">{text}</td>'
