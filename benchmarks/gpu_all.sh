#!/bin/bash
# Everything that needs a GPU, in one go, without a network:
#
#     benchmarks/gpu_all.sh [FOLDER OF WHEELS]
#
# What is missing is installed from the wheels first (on a machine with a network, collected by
#   pip download -d wheels 'cupy-cuda12x>=14' 'cuda-toolkit[nvrtc]==12.*' [flashinfer-python apache-tvm-ffi]).
# Figures go to benchmarks/results. Exit status: how many steps failed.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
failed=0

step() {
    echo "=== $*"
    timeout 300 "$@"
    local status=$?
    if [ $status -ne 0 ]; then
        echo "=== exit status $status: $*"
        failed=$((failed + 1))
    fi
}

if [ $# -gt 0 ]; then
    step "$python" -m pip install --quiet --no-index --find-links "$1" 'cupy-cuda12x>=14' 'cuda-toolkit[nvrtc]==12.*'
    ls "$1"/flashinfer* >/dev/null 2>&1 &&
        step "$python" -m pip install --quiet --no-index --no-deps --find-links "$1" flashinfer-python apache-tvm-ffi
fi
step "$python" -m pagewire.cli.main doctor
step "$python" -m pagewire.cli.main kernels build
for kernel in copy rows write sampling decode prefill; do # a kernel that fails takes the context with it, not the rest
    step "$python" -m benchmarks.kernels --only $kernel --out benchmarks/results/$kernel
done
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        step "$sanitizer" --tool $tool --error-exitcode 1 "$python" -m benchmarks.kernels --quick --check \
            --only rows --only copy --only write
    done
else
    echo "=== no compute-sanitizer: memcheck and racecheck are left out"
fi
echo "=== $failed steps failed"
exit $failed
