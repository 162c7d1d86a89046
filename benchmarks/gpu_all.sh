#!/bin/bash
# All that a GPU has to show, in at most 8 minutes and without a network: see benchmarks/gpu/__main__.py.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
