"""Checkpoints on the Hugging Face hub: headers by range requests first, weights when they are needed."""

from collections.abc import Mapping
from pathlib import Path

from fusion_bench_nufilt.storage.tensors import TensorInfo

Files = Mapping[str, Mapping[str, TensorInfo]]  # the tensors of each weight file, by key

_SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*"]


def small_files(name: str) -> Path:
    """Return a folder with a repository's small files, an adapter's weights, and what an earlier run downloaded.

    ``name`` is ``owner/model``, or ``owner/model@revision``.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = name.partition("@")
    try:
        small = [*_SMALL, "adapter_model.safetensors"]
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=small))
    except HFValidationError as error:
        raise ValueError(f"'{name}' is neither a folder nor the name of a hub repository") from error
    except Exception as error:  # no network, no such repository, no right to it: one answer, with the cause
        raise ValueError(f"'{name}' is no folder, and the hub can't give it: {error}") from error


def headers(name: str, folder: Path) -> Files:
    """Return the tensors in each weight file of the snapshot that :func:`small_files` began."""
    import huggingface_hub
    from huggingface_hub.errors import NotASafetensorsRepoError

    repository, _, _ = name.partition("@")
    try:
        # The snapshot's folder is named after its commit: headers and weights are of the same version.
        metadata = huggingface_hub.get_safetensors_metadata(repository, revision=folder.name)
    except NotASafetensorsRepoError as error:
        raise ValueError(
            f"'{name}' on the hub holds no safetensors; pickled weights run code when opened and are refused. "
            "Convert it with https://huggingface.co/spaces/safetensors/convert"
        ) from error
    except Exception as error:
        raise ValueError(f"'{name}': the hub can't give the headers of its weights: {error}") from error
    files: dict[str, dict[str, TensorInfo]] = {}
    for file, content in metadata.files_metadata.items():
        found = content.tensors.items()
        files[file] = {key: TensorInfo(file, str(t.dtype), tuple(t.shape), *t.data_offsets) for key, t in found}
    return files


def download(name: str, folder: Path, files: list[str]) -> Path:
    """Download weight files into the snapshot that :func:`small_files` began; interrupted downloads go on."""
    import huggingface_hub

    repository, _, _ = name.partition("@")
    wanted = [*_SMALL, *files]
    return Path(huggingface_hub.snapshot_download(repository, revision=folder.name, allow_patterns=wanted))
