"""The `nufilt` command. Each of its commands is the function of the same name in the file of the same name."""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

COMMANDS = {
    "merge": "Merge fine-tuned models into one, layer by layer, without loading a model.",
    "push": "Upload a merged folder to the Hugging Face hub.",
    "compare": "Compare continual merging methods over task orders.",
    "report": "Make one self-contained page of a run, a comparison, an analysis or a merge.",
    "analyze": "Ask why a merge works: subspaces of data and task vectors, what methods move, what collides.",
}

_SETTINGS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
app = typer.Typer(no_args_is_help=True, **_SETTINGS)


def _print_versions(wanted: bool) -> None:
    if wanted:
        print(", ".join(f"{name} {version(name)}" for name in ("fusion-bench-nufilt", "fusion-bench", "torch")))
        raise typer.Exit


@app.callback()
def main(
    versions: Annotated[
        bool, typer.Option("--version", help="Print the versions and stop.", callback=_print_versions, is_eager=True)
    ] = False,
) -> None:
    """Null-space filtering (NUFILT): merge checkpoints of any size, compare merging methods."""


class _Lazy(TyperCommand):
    """Stands in for a command until it is run or its help is printed, since importing torch takes two seconds."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **more: Any) -> Any:
        assert self.name is not None
        alone = typer.Typer(**_SETTINGS)
        alone.command(self.name)(getattr(import_module(f"{__package__}.{self.name}"), self.name))
        return typer.main.get_command(alone).make_context(info_name, args, *others, **more)


for _name, _summary in COMMANDS.items():
    app.command(_name, cls=_Lazy, help=_summary)(lambda: None)


if __name__ == "__main__":
    app()
