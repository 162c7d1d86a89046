// Products with a weight that stays packed, see linear.cuh.
#include "linear.cuh"

// Grid: tiles of rows, blocks of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(32 * SLICES, 3) linear_few(const __grid_constant__ Product p) {
    using K = Kind<T, Code, Scale, SPAN>;
    multiply_few<K>(p, SameRow(), Few<K>::ROWS * blockIdx.x, blockIdx.y);
}

// Grid: tiles of rows, tiles of outputs.
template <class T, class Code, class Scale, int SPAN>
__global__ void __launch_bounds__(Many::THREADS, 2) linear_many(const __grid_constant__ Product p) {
    multiply_many<Kind<T, Code, Scale, SPAN>>(p, SameRow(), Many::ROWS * blockIdx.x, blockIdx.y);
}
