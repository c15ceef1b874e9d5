"""Pieces of a page: words, tables that sort, charts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

Figure = dict[str, Any]  # of plotly: data, layout
Value = str | float | int | None


@dataclass
class Page:
    """A title and what stands below it, in order."""

    title: str
    subtitle: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")

    def words(self, *paragraphs: str) -> None:
        self.parts += [f"<p>{escape(text)}</p>" for text in paragraphs]

    def bullets(self, sentences: Iterable[str]) -> None:
        self.parts.append(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in sentences)}</ul>")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Value]], digits: int = 3) -> None:
        """A table that is sorted by a click on a header."""
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join(f"<tr>{''.join(_cell(value, digits) for value in row)}</tr>" for row in rows)
        self.parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')

    def chart(self, figure: Figure, height: int = 440) -> None:
        """A plotly figure."""
        self.parts.append(
            f'<div class="wide"><div class="chart" style="height:{height}px"></div>'
            f'<script type="application/json">{_inside_script(json.dumps(figure))}</script></div>'
        )

    def details(self, title: str, content: Any) -> None:
        """What only some want to see: anything JSON can hold, folded away."""
        text = json.dumps(content, indent=2, ensure_ascii=False)
        self.parts.append(f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>")

    def render(self) -> str:
        """The whole page, scripts and styles inside."""
        own = files(__package__)
        plotly = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
        style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
            f'<h1>{escape(self.title)}</h1>\n<p class="subtitle">{escape(self.subtitle)}</p>\n'
            + "\n".join(self.parts)
            + f"\n</main>\n<script>{_inside_script(plotly)}</script>\n<script>\n{script}</script>\n</body>\n</html>\n"
        )


def _cell(value: Value, digits: int) -> str:
    if value is None:
        return '<td class="number" data-value="">-</td>'
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = str(value) if isinstance(value, int) else _rounded(value, digits)
    return f'<td class="number" data-value="{value}">{text}</td>'


def _rounded(value: float, digits: int) -> str:
    return f"{value:.2e}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


def _inside_script(text: str) -> str:
    """A script element ends at the first ``</script``, even inside a string."""
    return text.replace("</script", "<\\/script")
