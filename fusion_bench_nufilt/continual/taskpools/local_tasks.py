"""The user's own image classification tasks for FusionBench's CLIP task pool, which only knows
built-in ones.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
from datasets import ClassLabel, Dataset, Features, Image, load_from_disk
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory


def load_image_task(
    name: str, path: str, template: str, classnames: Sequence[str] | None = None
) -> Dataset:
    """Load a test set, and register its class names and its prompt; a ``_target_`` for
    ``test_datasets``.

    The data set has the columns ``image`` (PIL) and ``label`` (int); a ValueError says what it or
    the template lacks.

    Args:
        name: the task's key in the task pool, and its model's in the model pool.
        path: a folder of images with a subfolder for each class, or one written by ``save_to_disk``
            of ``datasets``.
        template: the prompt, with ``{}`` for the class name.
        classnames: the name of each label; None: those of the data set, such as the names of the
            subfolders.
    """
    if "{}" not in template:
        raise ValueError(f"task '{name}': the template {template!r} has no {{}} for the class name")
    dataset = load_images(name, path)
    if classnames is None:
        feature = dataset.features["label"]
        if not isinstance(feature, ClassLabel):
            raise ValueError(
                f"task '{name}': the labels in '{path}' have no names, only {feature}: give "
                "classnames"
            )
        classnames = feature.names
    unnamed_labels = set(dataset["label"]) - set(range(len(classnames)))
    if unnamed_labels:
        label = min(unnamed_labels, key=str)  # they may be of several types
        raise ValueError(
            f"task '{name}': label {label!r} in '{path}' is not one of 0 to "
            f"{len(classnames) - 1}, for which there are class names"
        )
    register_task(name, classnames, template)
    return dataset


def load_images(name: str, path: str) -> Dataset:
    """Load images and labels as :func:`load_image_task` does; a ``_target_`` for
    ``train_datasets``.
    """
    folder = Path(path)
    if (folder / "dataset_dict.json").exists():
        raise ValueError(
            f"task '{name}': '{path}' holds several splits: name the folder of one, inside it"
        )
    if (folder / "state.json").exists():
        dataset = load_from_disk(path)
    else:
        dataset = _read_pictures(name, folder)
    missing_columns = {"image", "label"} - set(dataset.column_names)
    if missing_columns:
        raise ValueError(
            f"task '{name}': '{path}' has no column {' and no '.join(sorted(missing_columns))}, "
            f"only {', '.join(dataset.column_names)}: rename the columns"
        )
    return dataset.select_columns(["image", "label"])


def register_task(name: str, classnames: Sequence[str], template: str) -> None:
    """Tell FusionBench the class names and the prompt of a task, in place of its own."""
    info: dict[str, Any] = {"classnames": list(classnames), "templates": [template.format]}
    # FusionBench 0.2.33 misspells a key if it is given class names and templates only.
    with warnings.catch_warnings():
        # A test set that is looked up and then loaded is registered twice.
        warnings.filterwarnings("ignore", "Dataset .* is already registered")
        CLIPTemplateFactory.register_dataset(name, dataset_info=info, **info)


def _read_pictures(name: str, path: Path) -> Dataset:
    # The imagefolder of `datasets` would pick files by words like "train" in their names, and keep
    # a cache.
    endings = PIL.Image.registered_extensions()
    files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in endings)
    if not files:
        raise ValueError(
            f"task '{name}': '{path}' has neither subfolders with images, one for each class, nor "
            "a saved data set"
        )
    classes = [file.parent.name for file in files]
    features = Features({"image": Image(), "label": ClassLabel(names=sorted(set(classes)))})
    return Dataset.from_dict({"image": list(map(str, files)), "label": classes}, features=features)
