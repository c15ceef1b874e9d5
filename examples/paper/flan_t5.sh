#!/usr/bin/env bash
# The paper's Flan-T5-base setting: eight GLUE tasks in alphabetical order.
set -euo pipefail
fusion_bench method=nufilt modelpool=flan-t5-base_glue method.shuffle_order=false \
    path.log_dir=outputs/paper/flan-t5-base_glue "$@"
