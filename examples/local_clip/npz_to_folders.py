"""Write the data sets in .npz files as folders of PNG images, with a subfolder for each class.

    python examples/local_clip/npz_to_folders.py data/*.npz --out data/folders

A file ``scenes.npz`` with ``images_test`` (n, height, width, 3) uint8, ``labels_test`` (n,) and
``classnames`` becomes ``data/folders/scenes/<class>/<number>.png``. With ``--train``,
``images_train`` and ``labels_train`` become ``data/folders/train/scenes/<class>/<number>.png``.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--train", action="store_true", help="write the training sets, too")
    arguments = parser.parse_args()
    for file in arguments.files:
        with np.load(file) as data:
            write(data, "test", arguments.out / file.stem)
            if arguments.train:
                write(data, "train", arguments.out / "train" / file.stem)


def write(data: Mapping[str, np.ndarray], split: str, folder: Path) -> None:
    images, labels, classnames = (
        data[f"images_{split}"],
        data[f"labels_{split}"],
        data["classnames"],
    )
    for classname in classnames:
        (folder / classname).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / classnames[label] / f"{number:05d}.png")
    print(f"{folder}: {len(images)} images of {len(classnames)} classes")


if __name__ == "__main__":
    main()
