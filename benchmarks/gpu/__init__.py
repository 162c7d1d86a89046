"""All that a GPU has to show: right, then fast. `benchmarks/gpu_all.sh` runs it; see `__main__.py`."""
