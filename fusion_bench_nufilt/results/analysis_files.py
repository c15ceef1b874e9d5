"""What an analysis leaves in its folder: numbers, pictures, words."""

from pathlib import Path
from typing import Any

from fusion_bench_nufilt.analysis.reading import reading
from fusion_bench_nufilt.analysis.results import Analysis, save_json, save_tables
from fusion_bench_nufilt.analysis.summary import summarise
from fusion_bench_nufilt.storage.files import write_text

from .analysis_pictures import save_pictures


def save_analysis(analysis: Analysis, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write ``analysis.json``, tables as CSV, pictures as PNG and PDF, and ``reading.md``.

    Returns:
        The content of ``analysis.json``, with the words under ``reading``, and the names of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(analysis)
    summary["reading"] = reading(analysis, summary)
    save_json(folder, summary)
    write_text(folder / "reading.md", "\n".join(f"- {sentence}" for sentence in summary["reading"]) + "\n")
    return summary, [
        "analysis.json",
        "reading.md",
        *save_tables(analysis, folder),
        *save_pictures(analysis, summary, folder),
    ]
