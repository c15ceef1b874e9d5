#!/usr/bin/env bash
# One CLIP setting of the paper's main table: ten orders, ACC and BWT of each, mean and standard deviation.
#
#   examples/paper/clip.sh clip-vit-base-patch32_TA8 [more overrides of fusion_bench]
#
# Settings: clip-vit-{base-patch32,base-patch16,large-patch14}_{TA8,TALL14,TALL20}.
set -euo pipefail
setting=${1:?which setting? e.g. clip-vit-base-patch32_TA8}
shift
out=outputs/paper/$setting

for seed in $(seq 42 51); do
    fusion_bench method=nufilt modelpool="$setting" method.seed="$seed" method.save_on_every_step=false \
        path.log_dir="$out/seed_$seed" "$@"
done
python - "$out" <<'PY'
import json, pathlib, statistics, sys

runs = [json.loads(path.read_text()) for path in sorted(pathlib.Path(sys.argv[1]).glob("seed_*/accuracy_matrix.json"))]
for metric in ("ACC", "BWT"):
    values = [100 * run[metric] for run in runs]
    print(f"{metric} {statistics.mean(values):.1f} +- {statistics.stdev(values):.1f} over {len(values)} orders")
PY
