"""What of the log a terminal shows."""

import io
import logging

import pytest
from rich.console import Console

from fusion_bench_nufilt.utils.logs import TerminalLog, quiet_requests


def printed(**record):
    console = Console(file=io.StringIO(), width=80)
    TerminalLog(console).emit(logging.makeLogRecord({"levelname": "WARNING", **record}))
    return console.file.getvalue()


def test_a_message_can_not_control_the_terminal_and_keeps_its_lines():
    lines = printed(msg="a\x1b[31m\nb").splitlines()
    assert [line.rstrip() for line in lines] == ["WARNING  a\\x1b[31m", "         b"]


def test_the_trace_of_an_error_is_shown():
    error = ValueError("as said")
    text = printed(msg="failed", exc_info=(ValueError, error, None))
    assert "failed" in text
    assert "ValueError: as said" in text


@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_requests_to_the_hub_are_no_news_and_what_fails_is(client):
    quiet_requests()
    assert not logging.getLogger(client).isEnabledFor(logging.INFO)
    assert logging.getLogger(client).isEnabledFor(logging.WARNING)
