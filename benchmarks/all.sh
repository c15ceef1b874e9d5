#!/bin/bash
# Measure every speed that the documentation tells, and write the tables that its pages include: see all.py.
cd "$(dirname "$0")/.." && mkdir -p outputs/all
export OMP_WAIT_POLICY=passive RAY_worker_niceness=0 NUFILT_DEMO=b32 NUFILT_CACHE=$PWD/outputs/all/models
set -o pipefail
python benchmarks/all.py "$@" 2>&1 | tee outputs/all/log.txt
