#!/usr/bin/env bash
# The paper's ablation on CLIP-ViT-B/32, eight tasks, first order.
set -euo pipefail

run() {
    name=$1
    shift
    fusion_bench \
        fabric.loggers.name="nufilt/ablation/${name}" \
        method=nufilt/nufilt \
        "$@" \
        modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA8_model_only \
        taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8
}

run nufilt
run naive_sum method.null_space=false method.lora_rank=0
run filter_only method.lora_rank=0
run adapter_only method.null_space=false # the released code; the paper prints zero in place of false
