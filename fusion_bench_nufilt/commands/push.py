"""`nufilt push`: upload a merged folder to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi

from fusion_bench_nufilt.storage.files import MANIFEST

from .terminal import terminal


def push(
    out: Annotated[Path, typer.Argument(help="Folder that nufilt merge made.")],
    repo: Annotated[str, typer.Argument(help="Repository, OWNER/NAME; it is made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a merged folder, with its model card and its manifest, to the Hugging Face hub.

    You must be logged in there (hf auth login), or HF_TOKEN must hold a token with the right to write.
    """
    with terminal() as console:
        if not (out / MANIFEST).is_file():
            raise ValueError(f"'{out}' is no merged model: it has no {MANIFEST}")
        api = HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=out, commit_message="A model merged with NUFILT")
        console.print(f"[bold]{url}[/bold]", highlight=False)
