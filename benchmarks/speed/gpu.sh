#!/usr/bin/env bash
# What merges cost on one NVIDIA GPU, in at most nine minutes: OUT/gpu.md, with its log beside it.
#
#     benchmarks/speed/gpu.sh OUT                         # from the root; torch must be there, pip installs what else is not
#     benchmarks/speed/gpu.sh OUT --device cpu --tiny     # tiny sizes on a CPU, to try it
#
# TMPDIR is where models are made (60 GB for a whole 7B, or it is cut), PYTHON an interpreter, WHEELS a folder for pip.
set -uo pipefail
begin=$(date +%s)
out=${1:?usage: benchmarks/speed/gpu.sh OUT [--device cpu] [--tiny]}
shift
mkdir -p "$out"
scratch=$(mktemp -d "${TMPDIR:-/tmp}/nufilt_gpu.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive
for python in "${PYTHON:-python}" python3 .venv/bin/python; do
    "$python" -c 'import torch' 2>>"$out/setup.log" && break
done
needed='import fusion_bench, hypothesis, importlib.metadata, psutil, pytest, transformers, typer
importlib.metadata.version("fusion-bench-nufilt")'
if ! "$python" -c "$needed" 2>>"$out/setup.log"; then
    "$python" -c 'import torch; print(f"torch=={torch.__version__}")' >"$scratch/constraints.txt"
    "$python" -m venv --without-pip --system-site-packages "$scratch/venv"
    "$scratch/venv/bin/python" -c 'import pip, torch' 2>>"$out/setup.log" && python="$scratch/venv/bin/python"
    timeout 150 "$python" -m pip install --quiet --constraint "$scratch/constraints.txt" \
        ${WHEELS:+--no-index --find-links "$WHEELS"} --editable . hypothesis 2>&1 | tee -a "$out/setup.log"
fi
"$python" benchmarks/speed/gpu.py "$out" --scratch "$scratch" --until $((begin + 530)) "$@"
