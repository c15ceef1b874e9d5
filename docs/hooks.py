"""What the pages have beyond plain Markdown: the README as the first page, tables of options, read
off the code, formulas as MathML, and code that does not break at hyphens.

python docs/hooks.py    # write the tables into docs/options.md
"""

import dataclasses
import importlib
import re
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from fusion_bench_nufilt.continual.baselines.fusionbench import RuleConfig
from fusion_bench_nufilt.methods.options import (
    DeviceConfig,
    ProtocolConfig,
    ScaleConfig,
    Settings,
    SpectralConfig,
    TargetConfig,
)
from fusion_bench_nufilt.nufilt import FusionConfig
from fusion_bench_nufilt.utils.options import choices

METHODS = (FusionConfig, SpectralConfig, ScaleConfig)
KINDS = (*METHODS, TargetConfig, DeviceConfig, ProtocolConfig, RuleConfig, Settings)
# A page says `<!-- options: FusionConfig -->` where a table is to stand, or `<!-- options:
# FusionConfig lr ridge -->` for these two options; in options.md the table is committed, too.
PAGE = Path(__file__).parent / "options.md"
README = Path(__file__).parent.parent / "README.md"
# On the page that is the README.
INCLUDE = "<!-- README.md -->"
# On the page of the API, below the table of its names.
SIGNATURES = "<!-- signatures -->"
TABLES = {kind.__name__: kind for kind in KINDS}
# Formulas: $...$ and $$...$$ in pages, :math:`...` in docstrings.
FORMULAS = {
    r'<span class="arithmatex">\\\((.*?)\\\)</span>': "inline",
    r'(?<=<div class="arithmatex">)\\\[(.*?)\\\](?=</div>)': "block",
    r":math:<code>(.*?)</code>": "inline",
}


HYPHENATED = r"[\w.]*-[\w.-]*"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the README, or a table of options, where its mark stands."""
    if markdown.startswith(INCLUDE):
        # Its links are those of the repository's root.
        markdown = README.read_text(encoding="utf-8").replace("](docs/", "](")
    if SIGNATURES in markdown:
        markdown = markdown.replace(SIGNATURES, signatures(api_names(markdown)))
    table = r"(<!-- options: (\w+)((?: \w+)*) -->\n)(\n(?:\|.*\n)+)?"
    return re.sub(
        table,
        lambda match: f"{match[1]}\n{options_table(TABLES[match[2]], match[3].split())}\n",
        markdown,
    )


def api_names(markdown: str) -> list[str]:
    """The names in the first column of the tables of a page."""
    return re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`.*?) \|", markdown, re.MULTILINE)))


def signatures(names: list[str]) -> str:
    """What mkdocstrings makes the signatures and docstrings of names of the package from."""
    lines = []
    for name in names:
        module, _, attribute = f"fusion_bench_nufilt.{name}".rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        # Where it is defined: from the root of the package, names are imported on their first use.
        lines.append(f"::: {getattr(value, '__module__', module)}.{attribute}")
        if isinstance(value, type) and attribute != "LayerMethod":
            lines.append("    options: {members: [run], show_source: false}")
        if attribute in TABLES:
            lines.append(f"\n<!-- options: {attribute} -->")
        lines.append("")
    return "\n".join(lines)


def options_table(kind: type, names: list[str]) -> str:
    """The fields of a dataclass of options, or those with these names, as Markdown."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in dataclasses.fields(kind):
        if names and option.name not in names:
            continue
        symbol = f", {option.metadata['symbol']}" if option.metadata["symbol"] else ""
        words = " \\| ".join(f"`{_word(value)}`" for value in choices(option))
        default = f"{words}, default " if words and option.type is not bool else ""
        help = option.metadata["help"].replace("|", "\\|").replace("_", "\\_").replace("*", "\\*")
        rows.append(f"| `{option.name}`{symbol} | {default}`{_word(option.default)}` | {help} |")
    return "\n".join(rows)


def _word(value: Any) -> str:
    """A value as it stands in YAML."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def on_page_content(html: str, **_: Any) -> str:
    """Show formulas without a script, references in docstrings without their role, and options on
    one line.
    """
    for pattern, display in FORMULAS.items():
        html = re.sub(
            pattern,
            lambda match, how=display: convert(unescape(match[1]), display=how),
            html,
            flags=re.S,
        )
    whole = partial(re.sub, HYPHENATED, r'<span class="whole">\g<0></span>')
    html = re.sub(r"(?<=<code>)[^<\n]+(?=</code>)", lambda match: whole(match[0]), html)
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)


if __name__ == "__main__":
    PAGE.write_text(on_page_markdown(PAGE.read_text()))
