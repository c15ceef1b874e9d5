"""`nufilt report`: make the tables, pictures and page of earlier results."""

from pathlib import Path
from typing import Annotated

import typer

from fusion_bench_nufilt.pages.write import write_results

from .terminal import Quiet, name_files, terminal


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of a run, a comparison, an analysis or a merge."
        ),
    ],
    quiet: Quiet = False,
) -> None:
    """Make tables, pictures and one self-contained page, index.html, of a run, a comparison, an
    analysis or a merge.
    """
    with terminal(quiet) as console:
        name_files(console, folder, write_results(folder))
