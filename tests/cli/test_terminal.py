"""What is printed of names from elsewhere, and what is said when a command is stopped."""

import io
import logging
import os
import signal
import subprocess
import sys

import pytest
import typer
from rich.console import Console

from fusion_bench_nufilt.cli.terminal import bars_on, escape_markup, interruptible, terminal
from tests.cli.helpers import nufilt
from tests.conftest import REPO


def test_names_can_neither_control_the_terminal_nor_be_markup():
    console = Console(file=io.StringIO(), width=200)
    console.print(escape_markup("a\x1b[31m[bold]b\x07\u202ec\nd"))
    assert console.file.getvalue() == "a\\x1b[31m[bold]b\\x07\\u202ec\nd\n"


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "quiet", "shows"),
    [(Screen, False, True), (Screen, True, False), (io.StringIO, False, False)],
)
def test_progress_is_shown_on_a_terminal_only_and_the_log_above_it(
    monkeypatch, stream, quiet, shows
):
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(logging.root, "handlers", [])
    with terminal(quiet) as console, bars_on(console)(total=2, desc="Merging"):
        logging.getLogger("fusion_bench_nufilt").warning("as said")
    text = screen.getvalue()
    assert ("Merging" in text) == shows
    assert ("as said" in text) != quiet
    assert "Merging" not in text.partition("as said")[0].rpartition("\r")[2]


def stopped_at_work(number, console):
    with interruptible(console, ".out.nufilt"):
        try:
            os.kill(os.getpid(), number)
        finally:  # said before what is at work is done
            message = "finished work is kept in .out.nufilt; the same command goes on"
            assert message in console.file.getvalue()
            assert signal.getsignal(number) is signal.SIG_DFL  # the second one ends the process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_at_once_with_what_is_kept(number):
    before = signal.getsignal(number)
    with pytest.raises(typer.Exit) as stopped:
        stopped_at_work(number, Console(file=io.StringIO(), width=200))
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_where_nothing_happens_the_handlers_are_as_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(Console(), "x"):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


BOTH_AT_ONCE = """
import os, signal
from rich.console import Console
from fusion_bench_nufilt.cli.terminal import interruptible

both = {signal.SIGINT, signal.SIGTERM}
with interruptible(Console(stderr=True), "x"):
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)  # both arrive before either is handled
"""


def test_two_signals_at_once_end_the_process_without_a_word_of_pythons():
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", BOTH_AT_ONCE]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert "race condition" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_home_of_a_user_that_there_is_not_is_a_folder_that_is_missing():
    for words in (
        ("merge", "--base", "~no_such_user/base", "--task", "task", "--out", "out"),
        ("analyze", "--base", "base", "--task", "~no_such_user/task"),
        ("compare", "--methods", "nufilt", "--config-dir", "~no_such_user/configs"),
    ):
        code, text = nufilt(*words)
        assert code == 1
        assert "error: " in text
