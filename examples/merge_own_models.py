"""Merge your own Hugging Face models, in the order given, and save one that `from_pretrained` loads.

    python examples/merge_own_models.py --base BASE --task birds=FOLDER --task cars=FOLDER --out MERGED

The same from the command line, with a pool of your own in ``my_configs/modelpool/mine.yaml``:

    _target_: fusion_bench.modelpool.BaseModelPool
    models:
      _pretrained_: {_target_: transformers.AutoModel.from_pretrained, pretrained_model_name_or_path: BASE}
      birds: {_target_: transformers.AutoModel.from_pretrained, pretrained_model_name_or_path: FOLDER}
      cars: {_target_: transformers.AutoModel.from_pretrained, pretrained_model_name_or_path: FOLDER}

    fusion_bench 'hydra.searchpath=[file://my_configs]' method=nufilt modelpool=mine method.shuffle_order=false
"""

import argparse

from fusion_bench import BaseModelPool

from fusion_bench_nufilt import NufiltContinualMergingAlgorithm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--task", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--auto-class", default="AutoModel", help="class of transformers that loads them")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()

    folders = {"_pretrained_": arguments.base} | dict(task.split("=", 1) for task in arguments.task)
    target = f"transformers.{arguments.auto_class}.from_pretrained"
    models = {name: {"_target_": target, "pretrained_model_name_or_path": folder} for name, folder in folders.items()}
    algorithm = NufiltContinualMergingAlgorithm(shuffle_order=False)
    merged = algorithm.run(BaseModelPool(models))
    merged.save_pretrained(arguments.out)
    print(f"merged {', '.join(list(folders)[1:])} into {arguments.out}")


if __name__ == "__main__":
    main()
