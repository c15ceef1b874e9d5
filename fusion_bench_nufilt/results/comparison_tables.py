"""The comparison as tables: for the terminal, Markdown and LaTeX."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.markup import escape
from rich.table import Table as RichTable

from fusion_bench_nufilt.compare.paper import Published
from fusion_bench_nufilt.compare.summary import Comparison, Mean
from fusion_bench_nufilt.continual import METRICS

_NOTED = "†"  # beside a printed number of which something is to be said below


@dataclass(frozen=True)
class Cell:
    """A text, and whether it is the best or second best of its column."""

    text: str
    mark: Literal["", "best", "second"] = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column holds names, the others numbers.

    Args:
        references: so many rows at the top are not methods but single models.
        notes: lines below the table.
    """

    title: str
    header: list[str]
    rows: list[list[Cell]]
    references: int
    notes: list[str] = field(default_factory=list)


def main_table(comparison: Comparison) -> Table:
    """The headline metrics of every method, mean ± standard deviation over the seeds, beside the paper's numbers."""
    printed = comparison.published
    complete = all(len(method.matrices) == len(method.runs) for method in comparison.methods)
    headline = [name for name, metric in METRICS.items() if metric.headline]
    columns = {
        name: _marked(comparison, [method.metrics[name] for method in comparison.methods], sign=METRICS[name].signed)
        for name in headline
    }
    header = ["method", *(text for name in headline for text in (f"{name} %", f"paper {name}"))]
    header += ["extra params", "data", "merging s", "runs"]
    rows = [
        [Cell(label), Cell(f"{100 * comparison.reference(label):.1f}"), _paper(printed.get(label, {}), "ACC")]
        + [Cell("")] * (len(header) - 3)
        for label in comparison.references
    ]
    for place, method in enumerate(comparison.methods):
        numbers = printed.get(method.spec.label, {})
        done = "" if complete else f"{len(method.matrices)}/{len(method.runs)}"
        measured = [cell for name in headline for cell in (columns[name][place], _paper(numbers, name))]
        about = (_count(method.extra_parameters), method.data, _seconds(method.seconds), done)
        rows.append([Cell(method.spec.label), *measured, *map(Cell, about)])
    title = f"{len(comparison.tasks)} models merged one after another"
    notes = notes_on(comparison) + _paper_notes(printed, headline)
    table = Table(title, header, rows, len(comparison.references), notes)
    return _without_empty_columns(table)


def task_table(comparison: Comparison) -> Table:
    """Score of each task after the last step, mean ± standard deviation over the seeds."""
    columns = [_marked(comparison, [method.final(task) for method in comparison.methods]) for task in comparison.tasks]
    rows = [
        [Cell(label), *(Cell(Mean.of([scores[task]]).percent()) for task in comparison.tasks)]
        for label, scores in comparison.references.items()
    ]
    for number, method in enumerate(comparison.methods):
        rows.append([Cell(method.spec.label), *(column[number] for column in columns)])
    for label, numbers in comparison.published.items():
        if not numbers.keys().isdisjoint(comparison.tasks):
            rows.append([Cell(f"{label}, paper"), *(_paper(numbers, task) for task in comparison.tasks)])
    title = "Score (%) of each task after the last step"
    notes = notes_on(comparison) + _paper_notes(comparison.published, comparison.tasks)
    return Table(title, ["method", *comparison.tasks], rows, len(comparison.references), notes)


def _marked(comparison: Comparison, means: Sequence[Mean], *, sign: bool = False) -> list[Cell]:
    """The best and the second best of the methods that finished every seed and need no data; a failed one says so."""
    compared = [method.data == "none" and len(method.matrices) == len(method.runs) for method in comparison.methods]
    shown = [round(mean.mean, 3) if ok else math.nan for mean, ok in zip(means, compared, strict=True)]
    best, second, *_ = [*sorted({value for value in shown if not math.isnan(value)}, reverse=True), None, None]
    cells = []
    for method, mean, value in zip(comparison.methods, means, shown, strict=True):
        text = mean.percent(sign=sign) if method.matrices else "failed"
        cells.append(Cell(text, "best" if value == best else "second" if value == second else ""))
    return cells


def _paper(numbers: Published, name: str) -> Cell:
    """The printed value of a metric or a task, in per cent, with its deviation, and a mark if it has a note."""
    if name not in numbers:
        return Cell("")
    signed = name in METRICS and METRICS[name].signed
    value, deviation, note = numbers[name]
    text = f"{value:+.1f}" if signed else f"{value:.1f}"
    return Cell(text + ("" if deviation is None else f" ± {deviation:.1f}") + (_NOTED if note else ""))


def _paper_notes(printed: Mapping[str, Published], names: Sequence[str]) -> list[str]:
    """What is to be said of the printed numbers that are shown."""
    found = {
        (label, numbers[name].note): None
        for label, numbers in printed.items()
        for name in names
        if name in numbers and numbers[name].note
    }
    return [f"{_NOTED} the paper's {label}: {note}" for label, note in found]


def _count(number: int | None) -> str:
    """In millions."""
    return "-" if number is None else f"{number / 1e6:.3g} M" if number else "none"


def _seconds(mean: Mean) -> str:
    return "-" if math.isnan(mean.mean) else f"{mean.mean:.1f}"


def _without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.header)) if any(row[i].text not in ("", "-", "failed") for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.title, [table.header[i] for i in kept], rows, table.references, table.notes)


def notes_on(comparison: Comparison) -> list[str]:
    """Where the numbers come from, and what is missing."""
    seeds, settings = comparison.seeds, comparison.settings
    notes = [
        f"{settings['modelpool']}: {len(comparison.tasks)} tasks; "
        + ("mean ± standard deviation over " if len(seeds) > 1 else "")
        + _seeds(seeds)
    ]
    if settings["overrides"]:
        notes.append(f"with {' '.join(settings['overrides'])}")
    if comparison.environments:  # none where nothing was run
        notes.append(", ".join(f"{name} {version}" for name, version in comparison.environments.items()))
    if missing := sorted({task for method in comparison.finished for m in method.matrices for task in m.missing}):
        notes.append(f"no score, and not in the means: {', '.join(missing)}")
    for method in comparison.methods:
        for reason, failed in method.failures.items():
            notes.append(f"{method.spec.label} failed on {_seeds(failed)}: {reason}")
    return notes


def _seeds(numbers: Sequence[int]) -> str:
    """``seed 42``, ``seeds 42-51, 60``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)
    return f"seed{'s' if len(numbers) > 1 else ''} {text}"


# --- renderings ---


def as_rich(table: Table) -> RichTable:
    """For the terminal, without the notes: the best bold, the second best underlined."""
    rich = RichTable(title=table.title)
    rich.add_column(table.header[0])
    for name in table.header[1:]:
        rich.add_column(escape(name), justify="right", no_wrap=True)
    styles = {"": "", "best": "[bold]", "second": "[underline]"}
    for number, row in enumerate(table.rows, 1):
        last_reference = number == table.references < len(table.rows)
        rich.add_row(*(styles[cell.mark] + escape(cell.text) for cell in row), end_section=last_reference)
    return rich


def as_markdown(table: Table) -> str:
    """For GitHub: the best bold, the second best underlined."""
    marks = {"": "{}", "best": "**{}**", "second": "<ins>{}</ins>"}

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    lines = [
        line(table.header),
        line(["---", *["---:"] * (len(table.header) - 1)]),
        *(line([marks[cell.mark].format(cell.text) for cell in row]) for row in table.rows),
    ]
    return "\n".join([f"**{table.title}**", "", *lines, "", *(f"{note}  " for note in table.notes), ""])


def as_latex(table: Table) -> str:
    r"""A ``table`` environment for ``booktabs``: the best ``\textbf``, the second best ``\underline``."""
    marks: dict[str, Callable[[str], str]] = {
        "": lambda text: text,
        "best": lambda text: rf"\textbf{{{text}}}",
        "second": lambda text: rf"\underline{{{text}}}",
    }
    lines = [" & ".join(marks[cell.mark](_latex(cell.text)) for cell in row) + r" \\" for row in table.rows]
    if 0 < table.references < len(lines):
        lines.insert(table.references, r"\midrule")
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            *(f"% {note}" for note in table.notes),
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(table.title)}. {_latex(table.notes[0])}.}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
            r"\toprule",
            " & ".join(map(_latex, table.header)) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "λ": r"$\lambda$", _NOTED: r"$^\dagger$"}
)


def _latex(text: str) -> str:
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", text.translate(_LATEX))  # a minus sign, not the hyphen of 42-51
