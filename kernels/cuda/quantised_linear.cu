// Products of rows in 8 bits with weights in 8 bits, by tensor cores that multiply bytes: see linear.cuh.
//
// Rows come from quantised_rows.cu. Codes of weights are signed bytes, too, or floats; those that fill a fragment's registers
// lie together.
#include "linear.cuh"

// SPAN: 32 where groups of columns have scales, else 0. Grid: tiles of rows, blocks of outputs.
template <class T, class Pair, int SPAN>
__global__ void __launch_bounds__(32 * SLICES, 2) quantised_few(const __grid_constant__ Product p) {
    using K = Kind<Pair, pair_codes, float, SPAN, T>;
    multiply_few<K>(p, SameRow(), Few<K>::ROWS * blockIdx.x, blockIdx.y);
}

// Grid: tiles of rows, tiles of outputs.
template <class T, class Pair, int SPAN>
__global__ void __launch_bounds__(Many::THREADS, 2) quantised_many(const __grid_constant__ Product p) {
    multiply_many<Kind<Pair, pair_codes, float, SPAN, T>>(p, SameRow(), Many::ROWS * blockIdx.x, blockIdx.y);
}
