#!/bin/bash
# All that a GPU has to show, in at most 8 minutes and without a network: see benchmarks/gpu/__main__.py.
#
# pagewire need not be installed. Its packages lie side by side in this checkout, and are one namespace: links make one
# folder of them. Python must not look into the current folder first, for the checkout has one of the same name.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/packages/pagewire" "$folder/site"
ln -s "$root"/{cli,engine_core,frontend,ipc,kernels,workers} "$root"/pagewire/* "$folder/packages/pagewire"
export PYTHONPATH="$folder/packages:$folder/site:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
# PyTorch would start CUDA when it looks for GPUs, and a process that is forked afterwards could not use one.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
"${PYTHON:-python3}" -m benchmarks.gpu --site "$folder/site" "$@"
