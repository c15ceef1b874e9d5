#!/usr/bin/env bash
# The paper's ten task orders on a CLIP benchmark.
# Usage: clip_vit_ten_orders.sh [base-patch32|base-patch16|large-patch14] [TA8|TALL14|TALL20]
set -euo pipefail

MODEL=${1:-base-patch32}
TASKS=${2:-TA8}

for seed in $(seq 42 51); do
    fusion_bench \
        fabric.loggers.name="nufilt/clip-vit-${MODEL}_${TASKS}/seed_${seed}" \
        method=nufilt/nufilt \
        method.seed="${seed}" \
        method.save_on_every_step=false \
        modelpool="CLIPVisionModelPool/clip-vit-${MODEL}_${TASKS}_model_only" \
        taskpool="CLIPVisionModelTaskPool/clip-vit-classification_${TASKS}" \
        taskpool.base_model="openai/clip-vit-${MODEL}"
done
