// Operations on chunks of eight 16-bit floats, which a thread loads and stores in one instruction.
#pragma once

#include "ptx.cuh"

// The chunk of `f(pair of a, pair of b)` for the four pairs of two chunks.
template <class F>
DEVICE uint4 zip(uint4 a, uint4 b, F f) {
    return make_uint4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
}

// The sums of two chunks, rounded to T.
template <class T>
DEVICE uint4 add(uint4 a, uint4 b) {
    return zip(a, b, [](u32 a, u32 b) {
        const float2 x = unpack<T>(a), y = unpack<T>(b);
        return pack<T>(x.x + y.x, x.y + y.y);
    });
}

template <class T>
DEVICE float sum_of_squares(uint4 a) {
    float sum = 0.0f;
    auto add_pair = [&](u32 pair) {
        const float2 x = unpack<T>(pair);
        sum += x.x * x.x;
        sum += x.y * x.y;
    };
    add_pair(a.x);
    add_pair(a.y);
    add_pair(a.z);
    add_pair(a.w);
    return sum;
}

// x * scale * (weight + offset). With offset 0, x * scale is rounded first, as in Llama.
template <class T>
DEVICE float normed(float x, float scale, float weight, float offset) {
    const float y = x * scale;
    return offset == 0.0f ? rounded<T>(y) * weight : y * (weight + offset);
}

template <class T>
DEVICE uint4 scaled(uint4 a, float scale, uint4 weight, float offset) {
    return zip(a, weight, [=](u32 a, u32 w) {
        const float2 x = unpack<T>(a), y = unpack<T>(w);
        return pack<T>(normed<T>(x.x, scale, y.x, offset), normed<T>(x.y, scale, y.y, offset));
    });
}
