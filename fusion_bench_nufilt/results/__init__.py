"""One self-contained page for the folder of a run, a comparison or an analysis. Reads files; knows no other room."""

from .write import leave_page, write_page

__all__ = ["leave_page", "write_page"]
