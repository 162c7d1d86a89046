#!/bin/bash
# Everything that needs a GPU, in one go, without a network:
#
#     benchmarks/gpu_all.sh [FOLDER OF WHEELS]
#
# pagewire runs from this checkout. What Python lacks is installed from the wheels first; on a machine with a network
# they are collected by
#   pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#       pyzmq msgspec psutil uvloop llguidance prometheus-client pytest pytest-timeout iniconfig pluggy hypothesis \
#       sortedcontainers [cupy-cuda12x cuda-pathfinder nvidia-cuda-nvrtc-cu12 flashinfer-python apache-tvm-ffi]
# Figures go to benchmarks/results. Exit status: how many steps failed. SECONDS_LEFT (540) is what all may take: a step
# for which nothing is left is named and left out.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-540}))
failed=0

step() { # step SECONDS COMMAND...: at most so long
    local most=$1 left=$((end - SECONDS))
    shift
    if [ $left -lt 15 ]; then
        echo "=== no time left: $*"
        failed=$((failed + 1))
        return
    fi
    echo "=== $*"
    timeout $((left < most ? left : most)) "$@"
    local status=$?
    if [ $status -ne 0 ]; then
        echo "=== exit status $status: $*"
        failed=$((failed + 1))
    fi
}

# The packages lie side by side in this checkout, and are one namespace: links make it one folder.
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/pagewire"
for name in cli engine_core frontend ipc kernels workers; do ln -s "$PWD/$name" "$links/pagewire/$name"; done
for name in __init__.py demo; do ln -s "$PWD/pagewire/$name" "$links/pagewire/$name"; done
export PYTHONPATH="$links:$PWD"

if [ $# -gt 0 ]; then
    "$python" -m pip install --quiet --no-index --no-deps "$1"/*.whl || failed=$((failed + 1))
fi
step 60 "$python" -m pagewire.cli.main doctor
step 90 "$python" -m pagewire.cli.main kernels build
step 150 "$python" -m pytest -q -p no:cacheprovider tests/workers/device -k "gpu or sizes"
for kernel in rows lora write sampling decode prefill encoder; do # a kernel that fails takes the context with it, not the rest
    step 60 "$python" -m benchmarks.kernels --only $kernel --out benchmarks/results/$kernel
done
step 120 "$python" -m benchmarks.gpu_models --model llama-3.2-1b --adapters --out benchmarks/results/adapters
for model in llama-3.2-1b llama-3-8b qwen3-8b; do
    step 150 "$python" -m benchmarks.gpu_models --model $model --out benchmarks/results/$model
done
step 150 "$python" -m benchmarks.gpu_encoders --out benchmarks/results/encoders
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        step 60 "$sanitizer" --tool $tool --error-exitcode 1 "$python" -m benchmarks.kernels --quick --check
    done
else
    echo "=== no compute-sanitizer: memcheck and racecheck are left out"
fi
echo "=== $failed steps failed"
exit $failed
