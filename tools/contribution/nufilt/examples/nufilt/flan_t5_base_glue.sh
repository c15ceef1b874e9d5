#!/usr/bin/env bash
# Flan-T5-base on eight GLUE tasks, in the paper's order.
set -euo pipefail

fusion_bench \
    fabric.loggers.name=nufilt/flan-t5-base_glue \
    method=nufilt/nufilt \
    method.shuffle_order=false \
    modelpool=Seq2SeqLMPool/flan-t5-base_glue \
    taskpool=flan-t5_glue_text_generation
