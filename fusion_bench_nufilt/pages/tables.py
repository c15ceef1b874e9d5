"""A table of text, rendered for the terminal, as Markdown, and as HTML and LaTeX."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from markupsafe import Markup
from pandas.io.formats.style import Styler
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table as RichTable

from fusion_bench_nufilt.utils.files import escape_html, escape_markup, printable

from .metrics import AccuracyMatrix, percent, shown_number


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, with notes below."""

    title: str
    #: The index has the names of the rows, and its name is the header above them. It is no column:
    #: columns may be tasks, and a task may have any name.
    texts: pd.DataFrame
    #: By the names of the row and the column: 1 for the best and 2 for the second best.
    ranks: pd.DataFrame = field(default_factory=pd.DataFrame)
    references: int = 0  # the number of rows at the top that are single models
    notes: list[str] = field(default_factory=list)

    @property
    def header(self) -> list[str]:
        return [str(self.texts.index.name), *self.texts.columns]

    def rows(self, best: str, second: str, escaped: Callable[[str], str]) -> list[list[str]]:
        """Return the escaped names and texts; the best and second best texts are put into templates
        such as ``**{}**``.
        """
        templates = {1.0: best, 2.0: second}
        ranks = self.ranks.reindex(index=self.texts.index, columns=self.texts.columns)
        rows = []
        for number, name in enumerate(self.texts.index):
            row = [escaped(printable(name))]
            for text, rank in zip(self.texts.iloc[number], ranks.iloc[number], strict=True):
                row.append(templates.get(rank, "{}").format(escaped(printable(text))))
            rows.append(row)
        return rows

    def _styled(self, best: str, second: str, escaped: Callable[[str], str]) -> Styler:
        """Return the escaped table, which pandas writes as HTML and as LaTeX."""
        rows = self.rows(best, second, escaped)
        header = [escaped(printable(name)) for name in self.header]
        return pd.DataFrame(rows, columns=header).style.hide(axis="index")

    def as_html(self) -> Markup:
        """Render it for a page, without title and notes."""
        styled = self._styled("<b>{}</b>", "<u>{}</u>", escape_html)
        return Markup(styled.to_html(exclude_styles=True))

    def as_rich(self) -> RichTable:
        """Render it for the terminal, without the notes."""
        rich = RichTable(title=self.title)
        first, *columns = self.header
        rich.add_column(first)
        for name in columns:
            rich.add_column(escape_markup(name), justify="right", no_wrap=True)
        for number, row in enumerate(self.rows("[bold]{}[/]", "[underline]{}[/]", escape), 1):
            rich.add_row(*row, end_section=number == self.references < len(self.texts))
        return rich

    def as_markdown(self) -> str:
        rows = self.rows("**{}**", "<ins>{}</ins>", _markdown)
        frame = pd.DataFrame(rows, columns=[_markdown(name) for name in self.header])
        sides = ("left", *["right"] * (frame.shape[1] - 1))
        # tabulate would take texts for numbers, and print 75.0 as 75.
        text = frame.to_markdown(index=False, disable_numparse=True, colalign=sides)
        # In Markdown, a line breaks after two spaces.
        notes = [f"{escape_html(note)}  " for note in self.notes]
        return "\n".join([f"**{escape_html(self.title)}**", "", text, "", *notes, ""])

    def as_latex(self) -> str:
        """Render it as a ``table`` for ``booktabs``."""
        styled = self._styled(r"\textbf{{{}}}", r"\underline{{{}}}", _latex)
        # With the second note of a table that has ranks, which says what their marks mean.
        sentences = [self.title, *self.notes[: 1 if self.ranks.empty else 2]]
        caption = ". ".join(_latex(sentence) for sentence in sentences)
        text = styled.to_latex(
            column_format="l" + "r" * self.texts.shape[1],
            caption=caption + ".",
            position_float="centering",
            hrules=True,
        )
        lines = text.splitlines()
        # pandas draws no rule within a table, as there is here below the single models.
        if 0 < self.references < len(self.texts):
            lines.insert(lines.index(r"\midrule") + 1 + self.references, r"\midrule")
        notes = [f"% {note}" for note in self.notes]
        return "\n".join([r"% needs \usepackage{booktabs}", *notes, *lines, ""])


def number_table(frame: pd.DataFrame, digits: int = 2) -> Table:
    """Return names and numbers as text: columns without a value are left out, and numbers in a
    column of per cents have one decimal.
    """
    known = frame.dropna(axis="columns", how="all")
    names, *columns = known.columns
    texts = pd.DataFrame(index=pd.Index(known[names].astype(str), name=names))
    for name in columns:
        of_column = 1 if name.endswith("%") else digits
        texts[name] = [_cell_text(value, of_column) for value in known[name]]
    return Table("", texts)


def _cell_text(value: Any, digits: int) -> str:
    if isinstance(value, str):
        return value
    return "-" if pd.isna(value) else shown_number(value, digits)


def _markdown(text: str) -> str:
    """Escape the text of a cell in Markdown."""
    return escape_html(text).replace("|", "\\|")


def to_csv(rows: pd.DataFrame) -> str:
    # pandas would end the lines as the system does, and the same results have the same bytes.
    return rows.to_csv(index=False, lineterminator="\n")


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "λ": r"$\lambda$"}
)


def _latex(text: str) -> str:
    minus_sign = r"(?<![\w-])-(?=\d)"  # not the hyphen of 42-51
    return re.sub(minus_sign, "$-$", text.translate(_LATEX))


def print_matrix(matrix: AccuracyMatrix, title: str) -> None:
    """Print the accuracy matrix and its headline metrics in per cent; rows are steps and columns
    tasks, as merged.
    """
    tasks: list[str] = matrix.tasks
    if len(tasks) > 8:
        # So many names do not fit side by side; the rows say which number is which.
        tasks = [str(number) for number in range(1, len(tasks) + 1)]
    scores = pd.DataFrame(matrix.values, pd.Index(matrix.steps, name="after step"), tasks)
    # With evaluate=last, only the last row has scores.
    table = Table(title, scores.dropna(how="all").map(percent)).as_rich()
    table.caption = escape_markup(matrix.summary())
    print_table(table)


def print_table(table: RichTable, *, if_it_fits: bool = False) -> None:
    """Print a table to standard output; it is not cropped where that is not a terminal."""
    console = Console()
    width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    if not console.is_terminal:  # a pipe has no width of its own, and a cropped table is of no use
        console = Console(width=width)
    if width <= console.width or not if_it_fits:
        console.print(table)
