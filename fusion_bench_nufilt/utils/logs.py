"""What a terminal shows of the log."""

import logging

from rich.console import Console
from rich.logging import RichHandler
from tqdm.auto import tqdm

from .files import printable


class TerminalLog(RichHandler):
    """Prints the log above the progress bars, without the time and the place in the code that a log
    file has.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, show_time=False, show_path=False)
        self.setFormatter(logging.Formatter("%(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        return "\n".join(map(printable, lines))

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.console.file):
            super().emit(record)


def quiet_requests() -> None:
    """Leave out of the log each request that huggingface_hub makes, which its client tells."""
    for client in ("httpx", "httpx2"):  # of version 1, and of version 2
        logging.getLogger(client).setLevel(logging.WARNING)
