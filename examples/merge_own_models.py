"""Merge your own Hugging Face models in the order given; `from_pretrained` loads the result.

    python examples/merge_own_models.py --base BASE --task birds=FOLDER --task cars=FOLDER \\
        --out MERGED null_rank=43

Classifiers keep their heads: give ``--auto-class AutoModelForImageClassification``, and load them
with ``fusion_bench_nufilt.load_task("MERGED", "birds")``.

The same from the command line, with your own pool in ``my_configs/modelpool/mine.yaml``:

    _target_: fusion_bench.modelpool.BaseModelPool
    models:
      _pretrained_:
        _target_: transformers.AutoModel.from_pretrained
        pretrained_model_name_or_path: BASE
      birds:
        _target_: transformers.AutoModel.from_pretrained
        pretrained_model_name_or_path: FOLDER

    fusion_bench --config-dir my_configs method=nufilt modelpool=mine method.shuffle_order=false
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from fusion_bench import BaseModelPool
from omegaconf import OmegaConf
from transformers import AutoProcessor

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm
from fusion_bench_nufilt.utils.manifest import save_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True)
    parser.add_argument("--task", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument(
        "--auto-class", default="AutoModel", help="the class of transformers that loads the models"
    )
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "options", nargs="*", metavar="KEY=VALUE", help="any option of method=nufilt"
    )
    arguments = parser.parse_intermixed_args()

    tasks = dict(task.split("=", 1) for task in arguments.task)
    target = f"transformers.{arguments.auto_class}.from_pretrained"
    folders = {"_pretrained_": arguments.base, **tasks}
    models = {
        name: {"_target_": target, "pretrained_model_name_or_path": folder}
        for name, folder in folders.items()
    }
    options = {"shuffle_order": False, **OmegaConf.from_dotlist(arguments.options)}
    try:
        algorithm = NufiltContinualMergingAlgorithm(**options)
        merged = algorithm.run(BaseModelPool(models))
    except ValueError as error:
        parser.error(str(error))
    about = {"step": len(tasks), "tasks": algorithm.matrix.tasks, **algorithm.describe()}
    files = {**algorithm.files, **processor_files(arguments.base)}
    save_checkpoint(merged, Path(arguments.out), about, algorithm.state(), files)
    print(f"merged {', '.join(tasks)} into {arguments.out}")


def processor_files(base: str) -> dict[str, bytes]:
    """Read the files of the base's tokenizer or image processor, if it has one."""
    with TemporaryDirectory() as folder:
        try:
            AutoProcessor.from_pretrained(base).save_pretrained(folder)
        except (OSError, ValueError):
            print(f"{base} has no tokenizer and no processor to copy")
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


if __name__ == "__main__":
    main()
