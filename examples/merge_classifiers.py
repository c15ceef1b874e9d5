"""Merge classifiers of one backbone that each have their own labels, and classify a picture for
each task.

    python examples/merge_classifiers.py --base BASE --task birds --task cars --out MERGED \\
        --image photo.jpg

The backbone is merged; each task's head is kept in ``MERGED/heads``. Tasks are named after their
folders.
"""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor

from fusion_bench_nufilt import load_task
from fusion_bench_nufilt.merge import merge_folders, plan_merge


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="the backbone, or a classifier that has it")
    parser.add_argument("--task", action="append", required=True, metavar="FOLDER")
    parser.add_argument("--merged", help="an earlier result to add the tasks to")
    parser.add_argument("--out", required=True)
    parser.add_argument("--image", type=Path, help="a picture to classify for each task")
    arguments = parser.parse_args()
    try:
        plan = plan_merge(arguments.base, arguments.task, arguments.merged)
        out = merge_folders(plan, Path(arguments.out))
    except ValueError as error:
        parser.error(str(error))

    for task in json.loads((out / "nufilt.json").read_text())["heads"]:
        model = load_task(out, task)
        print(f"{task}: {type(model).__name__} with {model.num_labels} labels")
        if arguments.image:
            images = AutoImageProcessor.from_pretrained(out)(
                Image.open(arguments.image), return_tensors="pt"
            )
            with torch.no_grad():
                probabilities = model(**images).logits.softmax(-1)[0]
            best = int(probabilities.argmax())
            print(f"  {model.config.id2label[best]}, {probabilities[best]:.0%}")


if __name__ == "__main__":
    main()
