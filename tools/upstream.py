#!/usr/bin/env python
"""Add a contribution to a FusionBench checkout, for its maintainers to review.

    python tools/upstream.py CHECKOUT [--what nufilt|fixes] [--format-patch OUT] \\
        [--author 'NAME <MAIL>']

``docs/develop.md`` says more.
"""

import argparse
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
NUFILT = TOOLS.parent / "fusion_bench_nufilt" / "nufilt"
PATCHES = sorted((TOOLS / "patches").glob("*.patch"))
METHODS = "fusion_bench/method/__init__.py"
API = "docs/api/fusion_bench.method/merging.md"
AUTHOR = "fusion-bench-nufilt contributors <contributors@example.org>"
LICENCE = """\
Licence: the authors of the contributed files, which are under Apache-2.0 in the plugin
fusion-bench-nufilt, offer them under the MIT licence of FusionBench as well."""


@dataclass(frozen=True)
class Contribution:
    """A folder of new files, lines to insert into FusionBench's files, each after a line with an
    anchor, and files to copy.
    """

    subject: str
    about: str
    insertions: dict[str, list[tuple[str, str]]]
    copies: dict[str, Path] = field(default_factory=dict)
    """Files of this package that are added as they are, by their paths in FusionBench."""

    @property
    def message(self) -> str:
        return f"{self.subject}\n\n{self.about}\n\n{LICENCE}\n"


def _in_api(title: str, member: str) -> tuple[str, str]:
    text = (
        f"\n### {title}\n\n::: fusion_bench.method\n    options:\n        show_root_heading: "
        "false\n"
    )
    return (
        "        - ContinualDOPForCLIP",
        f"{text}        heading_level: 4\n        members:\n        - {member}\n",
    )


CONTRIBUTIONS = {
    "nufilt": Contribution(
        "feat: NUFILT, null-space filtering for data-free continual model merging",
        "Qiu et al., ICLR 2026, https://arxiv.org/abs/2509.21413. One class for the models of all "
        "pools; no new\n"
        "dependency; works with transformers 4 and 5.",
        {
            METHODS: [
                ('    "dop": [', '    "nufilt": ["NUFILTMerging"],\n'),
                ("    from .model_stock import ", "    from .nufilt import NUFILTMerging\n"),
            ],
            "mkdocs.yml": [
                ("- OPCM: algorithms/opcm.md", "          - NUFILT: algorithms/nufilt.md\n")
            ],
            API: [_in_api("Null-Space Filtering (NUFILT)", "NUFILTMerging")],
        },
        {
            f"fusion_bench/method/nufilt/{name}.py": NUFILT / f"{name}.py"
            for name in (
                "config",
                "blocks",
                "noise",
                "eigenvectors",
                "subspace",
                "adapter",
                "step",
            )
        },
    ),
}


def lay(checkout: Path, what: str = "nufilt") -> list[str]:
    """Write a contribution into a checkout or an unpacked source distribution; written again, it
    replaces itself.

    Raises:
        ValueError: the folder is not FusionBench, or is too different; nothing is written.

    Returns:
        The paths that were written, relative to the folder.
    """
    files = insertions(checkout, what)
    for path, source in CONTRIBUTIONS[what].copies.items():
        files[path] = source.read_text(encoding="utf-8")
    source = TOOLS / "contribution" / what
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            files[path.relative_to(source).as_posix()] = path.read_text(encoding="utf-8")
    written = []
    for path, text in files.items():
        if path.startswith("config/") and not (checkout / "config").is_dir():
            path = f"fusion_bench_{path}"  # as a source distribution names the folder
        target = checkout / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            target.chmod(0o755)
        written.append(path)
    return sorted(written)


def insertions(checkout: Path, what: str) -> dict[str, str]:
    """Return FusionBench's files that get more lines, with these lines; files that are missing are
    left out.

    Raises:
        ValueError: the folder is not FusionBench, or a line that new ones should follow is missing.
    """
    if not (checkout / METHODS).is_file():
        raise ValueError(f"'{checkout}' is no FusionBench checkout: it has no {METHODS}")
    changed = {}
    for path, lines in CONTRIBUTIONS[what].insertions.items():
        if not (checkout / path).is_file():  # a source distribution has no documentation
            continue
        text = (checkout / path).read_text(encoding="utf-8")
        for anchor, line in lines:
            before, found, after = text.partition(anchor)
            if not found:
                raise ValueError(f"{checkout / path} has no line with '{anchor.strip()}'")
            rest, end, after = after.partition("\n")
            if line not in text:
                text = f"{before}{found}{rest}{end}{line}{after}"
        changed[path] = text
    return changed


def mend(checkout: Path) -> list[str]:
    """Apply the patches in ``tools/patches`` to the files of a checkout, and return their names."""
    for patch in PATCHES:
        _git(checkout, "apply", str(patch))
    return [patch.name for patch in PATCHES]


def format_patch(checkout: Path, paths: list[str], what: str, author: str) -> str:
    """Return the written files as one patch for ``git am``; the checkout's branch and index do not
    change.
    """
    name, mail = re.fullmatch(r"(.+) <(.+)>", author).groups()
    identity = {}
    for role in ("AUTHOR", "COMMITTER"):
        identity |= {f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": mail}
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        _git(checkout, "read-tree", "HEAD", **index)
        _git(checkout, "add", "--force", "--", *paths, **index)
        tree = _git(checkout, "write-tree", **index)
    commit = _git(
        checkout, "commit-tree", tree, "-p", "HEAD", "-m", CONTRIBUTIONS[what].message, **identity
    )
    return _git(checkout, "format-patch", "--stdout", "--no-signature", "-1", commit) + "\n"


def fixes(author: str) -> str:
    """Return the patches in ``tools/patches``, by this author, for ``git am``."""
    return "".join(
        re.sub(r"(?m)^From: .*", f"From: {author}", path.read_text(), count=1) for path in PATCHES
    )


def _git(checkout: Path, *arguments: str, **environment: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", type=Path, help="folder of a FusionBench checkout, main or v0.2.33"
    )
    parser.add_argument("--what", choices=[*CONTRIBUTIONS, "fixes"], default="nufilt")
    parser.add_argument(
        "--format-patch", type=Path, metavar="OUT", help="also write a patch for git am"
    )
    parser.add_argument(
        "--author", default=AUTHOR, metavar="'NAME <MAIL>'", help="who is named in the patch"
    )
    arguments = parser.parse_args()
    if not re.fullmatch(r"[^<>\n]+ <[^<>\s]+>", arguments.author):
        parser.error(f"--author must be 'NAME <MAIL>', got {arguments.author!r}")
    checkout = arguments.checkout
    what = arguments.what
    try:
        if what == "fixes":
            paths = mend(checkout)
            make_patch = partial(fixes, arguments.author)
        else:
            paths = lay(checkout, what)
            make_patch = partial(format_patch, checkout, paths, what, arguments.author)
        if arguments.format_patch is not None:
            arguments.format_patch.write_text(make_patch(), encoding="utf-8")
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print(*paths, "", LICENCE, sep="\n")


if __name__ == "__main__":
    main()
