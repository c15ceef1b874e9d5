"""Image classification tasks of one's own, for FusionBench's CLIP task pool, which knows only its own by name."""

from collections.abc import Sequence
from pathlib import Path

import PIL.Image
from datasets import ClassLabel, Dataset, Features, Image, load_from_disk
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory


def load_image_task(name: str, path: str, template: str, classnames: Sequence[str] | None = None) -> Dataset:
    """A test set, its class names and its prompts, as ``_target_`` of an entry of ``test_datasets``.

    Args:
        name: of the task; the key of this entry in the task pool and of its model in the model pool.
        path: a folder of images with one subfolder for each class, or a folder written by ``datasets``'
            ``save_to_disk``.
        template: the prompt, with ``{}`` for the class name.
        classnames: by label; default: those of the data set, i.e. the names of the subfolders.

    Returns:
        Data set with columns ``image`` (PIL) and ``label`` (int).

    Raises:
        ValueError: no images, several splits, a column missing, labels without a name, or no ``{}``.
    """
    if "{}" not in template:
        raise ValueError(f"task '{name}': the template {template!r} has no {{}} for the class name")
    dataset = load_images(name, path)
    if classnames is None:
        feature = dataset.features["label"]
        if not isinstance(feature, ClassLabel):
            raise ValueError(f"task '{name}': the labels in '{path}' have no names, only {feature}: give classnames")
        classnames = feature.names
    labels = set(dataset["label"])
    if unnamed := labels - set(range(len(classnames))):
        raise ValueError(
            f"task '{name}': label {min(unnamed, key=str)!r} in '{path}' is not one of 0 to {len(classnames) - 1}, "
            f"for which there are class names"
        )
    register_task(name, classnames, template)
    return dataset


def load_images(name: str, path: str) -> Dataset:
    """The images of a task alone, as ``_target_`` of an entry of ``train_datasets``.

    Args:
        name: of the task.
        path: as for :func:`load_image_task`; labels must be those of the test set.

    Returns:
        Data set with columns ``image`` (PIL) and ``label`` (int).

    Raises:
        ValueError: no images, several splits, or a column missing.
    """
    dataset = _load(name, Path(path))
    if missing := {"image", "label"} - set(dataset.column_names):
        raise ValueError(
            f"task '{name}': '{path}' has no column {' and no '.join(sorted(missing))}, only "
            f"{', '.join(dataset.column_names)}: rename the columns"
        )
    return dataset.select_columns(["image", "label"])


def register_task(name: str, classnames: Sequence[str], template: str) -> None:
    """Tell FusionBench the class names and the prompt of a task, in place of what it knows by that name."""
    classnames, templates = list(classnames), [template.format]
    # Given class names and templates alone, `register_dataset` misspells a key (0.2.33).
    CLIPTemplateFactory.register_dataset(
        name,
        dataset_info={"classnames": classnames, "templates": templates},
        classnames=classnames,
        templates=templates,
    )


def _load(name: str, path: Path) -> Dataset:
    if (path / "dataset_dict.json").exists():
        raise ValueError(f"task '{name}': '{path}' holds several splits: name the folder of one, inside it")
    if (path / "state.json").exists():
        return load_from_disk(str(path))
    # Not `datasets`' own imagefolder: that one picks files by words like "train" in their names, and keeps a cache.
    endings = PIL.Image.registered_extensions()
    files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in endings)
    if not files:
        raise ValueError(
            f"task '{name}': '{path}' has neither subfolders with images, one for each class, nor a saved data set"
        )
    folders = [file.parent.name for file in files]
    return Dataset.from_dict(
        {"image": [str(file) for file in files], "label": folders},
        features=Features({"image": Image(), "label": ClassLabel(names=sorted(set(folders)))}),
    )
