"""What the site has beyond plain Markdown: formulas as MathML, and the table of options."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

# Written as $...$ or $$...$$ in pages, as :math:`...` in docstrings.
_FORMULAS = (
    (r'<span class="arithmatex">\\\((.*?)\\\)</span>', "inline"),
    (r'<div class="arithmatex">\\\[(.*?)\\\]</div>', "block"),
    (r":math:<code>(.*?)</code>", "inline"),
)


def on_page_content(html: str, **_: Any) -> str:
    """Show formulas without a script, and references in docstrings without their role."""
    for pattern, display in _FORMULAS:
        html = re.sub(pattern, lambda match, how=display: convert(unescape(match[1]), display=how), html, flags=re.S)
    return re.sub(r":(?:class|func|meth|mod):(?=<code>)", "", html)
