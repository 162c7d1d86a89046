// Kernels with errors that the emulation must report.
#include "ptx.cuh"

struct Fail {
    int* out;
};

enum Failure { DEADLOCK, MASK, MISALIGNED, UNMAPPED, MISALIGNED_LOAD, TOO_MUCH_SHARED, UNSET };

template <int FAILURE>
__global__ void fail(const __grid_constant__ Fail p) {
    const int thread = threadIdx.x;
    if (FAILURE == DEADLOCK && thread < 40) __syncthreads();
    if (FAILURE == MASK) __shfl_sync(0xffff, thread, 0);
    if (FAILURE == MISALIGNED) copy_async_16(shared_memory() + 4, p.out, true);
    if (FAILURE == UNMAPPED) reinterpret_cast<int*>(u64(4096))[thread] = 1;
    if (FAILURE == MISALIGNED_LOAD) p.out[thread] = reinterpret_cast<const uint4*>(shared_memory() + 8)->x;
    if (FAILURE == TOO_MUCH_SHARED) shared_memory()[256] = 1;
    if (FAILURE == UNSET) p.out[thread] = reinterpret_cast<int*>(shared_memory())[thread];
}
