"""What a terminal shows of what a command prints."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b])", re.DOTALL)


def lines_of(text, columns):
    """The lines that stand on a terminal of that width in the end."""
    rows = {}
    row = column = 0
    for number, letter, control, character in _PARTS.findall(text):
        if letter == "A":  # as progress bars do, which stand below each other
            row -= int(number or 1)
        elif control == "\n":
            row += 1
        elif control == "\r":
            column = 0
        elif character:
            if column == columns:
                row += 1
                column = 0
            rows.setdefault(row, {})[column] = character
            column += 1
    lines = []
    for cells in rows.values():
        lines.append("".join(cells.get(place, " ") for place in range(max(cells) + 1)).rstrip())
    return [line for line in lines if line]


def run_on_terminal(command, folder, environment, columns=120):
    """Run a command on a terminal of its own; return its exit code and the lines that it leaves."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        output = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux has no other end of a terminal
                break
            if not part:
                break
            output += part
    os.close(ours)
    return process.returncode, lines_of(output.decode(errors="replace"), columns)
