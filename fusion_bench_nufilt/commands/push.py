"""`nufilt push`: upload a merged folder to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import CommitOperationAdd, HfApi, get_token

from fusion_bench_nufilt.storage.checkpoint import read_manifest, verify_files
from fusion_bench_nufilt.storage.files import CARD, MANIFEST

from .terminal import Quiet, terminal


def push(
    out: Annotated[Path, typer.Argument(help="Folder that nufilt merge made.")],
    repo: Annotated[
        str, typer.Argument(help="Repository, OWNER/NAME; it is made if it does not exist.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Upload a merged folder, with its model card and its manifest, to the Hugging Face hub.

    Only files that the manifest lists are uploaded, if all of them are as they were saved. Log in
    by hf auth login, or let HF_TOKEN hold a token with write access.
    """
    with terminal(quiet) as console:
        files = {name: out / name for name in _files_of_result(out)}
        token = get_token() or ""
        if not (token and token.isascii() and token.isprintable()):
            raise ValueError(
                "no token of the hub is at hand: log in with `hf auth login`, or set HF_TOKEN"
            )
        api = HfApi(token=token)
        added = [CommitOperationAdd(name, path) for name, path in files.items()]
        try:
            url = api.create_repo(repo, private=private, exist_ok=True)
            api.create_commit(url.repo_id, added, commit_message="A model merged with NUFILT")
        except (
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # huggingface_hub takes every answer for a hub's
            raise ValueError(
                f"'{api.endpoint}' does not answer like a hub ({error!r}): look at HF_ENDPOINT"
            ) from error
        console.print(f"[bold]{url}[/bold]")


def _files_of_result(out: Path) -> list[str]:
    """Return the manifest and the files that it lists; refuse a file that is not what was saved."""
    advice = "merge again"
    manifest = read_manifest(out, advice)
    if manifest is None or not manifest.get("files"):
        raise ValueError(
            f"'{out}' is no merged model: it has no {MANIFEST} that lists its files; {advice}"
        )
    verify_files(out, manifest, advice)
    names = [
        name for name in (*manifest["files"], MANIFEST) if name != CARD or (out / CARD).is_file()
    ]
    for path in map(out.joinpath, names):
        if not path.resolve().is_relative_to(out.resolve()):
            raise ValueError(
                f"'{path}' is a link to '{path.resolve()}', out of the folder: put the file there"
            )
    return names
