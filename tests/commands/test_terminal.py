"""What is printed of names from elsewhere, and what is said when a command is stopped."""

import io
import os
import signal

import pytest
import typer
from rich.console import Console

from fusion_bench_nufilt.commands.terminal import interruptible, shown


def test_names_can_neither_control_the_terminal_nor_be_markup():
    console = Console(file=io.StringIO(), width=200)
    console.print(shown("a\x1b[31m[bold]b\x07\u202ec\nd"))
    assert console.file.getvalue() == "a\\x1b[31m[bold]b\\x07\\u202ec\nd\n"


def stopped_at_work(number, console):
    with interruptible(console, ".out.nufilt"):
        try:
            os.kill(os.getpid(), number)
        finally:  # said before what is at work is done
            assert "finished work is kept in .out.nufilt; the same command goes on" in console.file.getvalue()
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
