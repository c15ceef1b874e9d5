"""`nufilt report`: a page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from fusion_bench_nufilt.results.write import write_page

from .terminal import terminal


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run, a comparison or an analysis.")],
) -> None:
    """Make one self-contained page, index.html, of a run, a comparison or an analysis. It opens from disk."""
    with terminal() as console:
        console.print(f"[bold]{write_page(folder)}[/bold]", highlight=False)
