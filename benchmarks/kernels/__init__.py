"""The CUDA kernels on a GPU: right, and how fast beside what the device can do and beside others.

    python -m benchmarks.kernels [--only decode] [--quick] [--check] [--out benchmarks/results]

Each case is compared with float64 on fresh random inputs, then timed: a CUDA graph of many calls over rotating
buffers that together exceed the L2 cache, median of many replays. Floors are measured, not looked up: a large copy
for bytes, a large product for operations. Peers are PyTorch, and FlashInfer where it is installed.
"""
