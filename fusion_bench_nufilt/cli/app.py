"""The `nufilt` command. Each of its commands is the function of the same name in the file of the
same name.
"""

import atexit
import gc
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

COMMANDS = {
    "merge": "Merge fine-tuned models into one, layer by layer, without loading a model.",
    "mergekit": "Run mergekit with the methods of nufilt merge.",
    "compare": "Compare continual merging methods over task orders.",
    "report": "Make one self-contained page of a run, a comparison, an analysis or a merge.",
    "analyze": "Show why a merge works: subspaces of data and task vectors, what methods move, "
    "what collides.",
}
EXAMPLES = {
    "merge": (
        "--base BASE --task T1 --task T2 --out OUT --dry-run",
        "--base BASE --merged OUT --task T3 --out OUT3",
    ),
    "mergekit": ("mergekit.yaml OUT --lazy-unpickle",),
    "compare": (
        "--methods spectral,nufilt:null_rank=21:lora_rank=10,opcm",
        "--preset paper --seeds 42:52 --jobs 2",
    ),
    "report": ("outputs/compare",),
    "analyze": (
        "--base BASE --task T1 --task T2",
        "--modelpool nufilt_demo --methods spectral,opcm",
    ),
}

_SETTINGS: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}}
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, **_SETTINGS)


def _print_versions(wanted: bool) -> None:
    if wanted:
        packages = ("fusion-bench-nufilt", "fusion-bench", "torch")
        print(", ".join(f"{package} {version(package)}" for package in packages))
        raise typer.Exit


@app.callback()
def main(
    versions: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions and stop.",
            callback=_print_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Null-space filtering (NUFILT): merge checkpoints of any size, compare merging methods."""
    # Python ends with a search for garbage among all that was imported, of more than a second.
    atexit.register(gc.freeze)


class _Lazy(TyperCommand):
    """Stands in for a command until it is run or its help is shown, since importing torch takes two
    seconds.
    """

    def make_context(
        self, info_name: str | None, args: list[str], *others: Any, **more: Any
    ) -> Any:
        assert self.name is not None
        module = import_module(f"{__package__}.{self.name}")
        function = getattr(module, self.name)
        examples = ["Examples:"]
        for words in EXAMPLES[self.name]:
            examples.append(f"nufilt {self.name} {words}")
        settings = dict(_SETTINGS["context_settings"])
        settings["ignore_unknown_options"] = self.name == "mergekit"  # it passes them on
        # typer reads a signature when it makes a command, so that this waits for the function.
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name, epilog="\n\n".join(examples), context_settings=settings)(function)
        return typer.main.get_command(single).make_context(info_name, args, *others, **more)


for _name, _summary in COMMANDS.items():
    # A docstring as the summary would take the imports of its file.
    app.command(_name, cls=_Lazy, help=_summary)(lambda: None)


if __name__ == "__main__":
    app()
