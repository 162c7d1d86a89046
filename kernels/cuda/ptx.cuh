// Element types, and every PTX instruction that the kernels use, each with an equivalent for the tests' emulation.
//
// No CUDA header is included, so NVRTC alone can compile the kernels.
#pragma once

#define DEVICE __device__ __forceinline__

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };
struct e4m3 { u8 bits; };  // sign, 4 bits of exponent, 3 of mantissa; no infinities; up to 448
struct e5m2 { u8 bits; };  // the upper half of an fp16; up to 57344
struct s8x2 { u16 bits; };    // two signed bytes, the first in the lower half; and so two e4m3
struct e4m3x2 { u16 bits; };

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
template <class T> constexpr bool is_fp8 = sizeof(T) == 1;
template <class T> struct SumType { using type = float; };
template <> struct SumType<s8x2> { using type = int; };
// The type in which tensor cores add up products of T.
template <class T> using SumOf = typename SumType<T>::type;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;

// ---------------------------------------------------------------- conversion of an element from and to float32

#ifdef EMULATED

DEVICE u16 bf16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
DEVICE u16 fp16_bits(float x) {
    const _Float16 half = _Float16(x);
    u16 bits;
    memcpy(&bits, &half, 2);
    return x != x ? 0x7fff : bits;
}
DEVICE float fp16_value(u16 bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}

#else

DEVICE u16 bf16_bits(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE u16 fp16_bits(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE float fp16_value(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

#endif

// Rounds to an 8-bit float, to nearest even. Larger values become the largest; NaN stays NaN.
template <int EXPONENT_BITS>
DEVICE u8 fp8_bits(float x) {
    constexpr int MANTISSA_BITS = 7 - EXPONENT_BITS, BIAS = (1 << (EXPONENT_BITS - 1)) - 1;
    constexpr u32 LARGEST = EXPONENT_BITS == 4 ? 0x7e : 0x7b, NOT_A_NUMBER = 0x7f;
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return u8(sign | NOT_A_NUMBER);
    u32 result;
    if (magnitude < u32(127 - BIAS + 1) << 23) {  // subnormal: adding a power of two rounds at the last bit
        const float place = __uint_as_float(u32(127 - BIAS + 1 - MANTISSA_BITS + 23) << 23);
        result = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), place)) - __float_as_uint(place);
    } else {
        constexpr int CUT = 23 - MANTISSA_BITS;
        const u32 rounded = magnitude + (1u << (CUT - 1)) - 1 + (magnitude >> CUT & 1);
        result = (rounded >> CUT) - (u32(127 - BIAS) << MANTISSA_BITS);
    }
    return u8(sign | (result < LARGEST ? result : LARGEST));
}

// The value through fp16: an e5m2 is the upper half of an fp16; an e4m3 has one exponent bit less, which a product with
// 2^8 corrects.
DEVICE float fp8_value(e5m2 x) { return fp16_value(u16(x.bits << 8)); }
DEVICE float fp8_value(e4m3 x) {
    const u32 bits = x.bits;
    if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fffffff);
    return fp16_value(u16((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f;
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float to_float(fp16 x) { return fp16_value(x.bits); }
DEVICE float to_float(e4m3 x) { return fp8_value(x); }
DEVICE float to_float(e5m2 x) { return fp8_value(x); }

template <class T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) { return {bf16_bits(x)}; }
template <> DEVICE fp16 from_float<fp16>(float x) { return {fp16_bits(x)}; }
template <> DEVICE e4m3 from_float<e4m3>(float x) { return {fp8_bits<4>(x)}; }
template <> DEVICE e5m2 from_float<e5m2>(float x) { return {fp8_bits<5>(x)}; }

// x rounded to T.
template <class T> DEVICE float rounded(float x) { return to_float(from_float<T>(x)); }

// ---------------------------------------------------------------- pairs: the first element in the lower half

template <class T> DEVICE u32 pack(float first, float second);
template <class T> DEVICE float2 unpack(u32 pair);
template <> DEVICE float2 unpack<bf16>(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> DEVICE float2 unpack<fp16>(u32 pair) {
    return make_float2(fp16_value(u16(pair)), fp16_value(u16(pair >> 16)));
}

#ifdef EMULATED

template <> DEVICE u32 pack<bf16>(float first, float second) { return bf16_bits(first) | u32(bf16_bits(second)) << 16; }
template <> DEVICE u32 pack<fp16>(float first, float second) { return fp16_bits(first) | u32(fp16_bits(second)) << 16; }

#else

template <> DEVICE u32 pack<bf16>(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
template <> DEVICE u32 pack<fp16>(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

#endif

// The products of two pairs. Subnormal numbers are kept.
template <class T>
DEVICE u32 multiply_pairs(u32 x, u32 y) {
#ifdef EMULATED
    const float2 a = unpack<T>(x), b = unpack<T>(y);
    return pack<T>(a.x * b.x, a.y * b.y);
#else
    u32 pair;
    if constexpr (is_same<T, bf16>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(x), "r"(y), "r"(0x80008000u));  // - 0
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
    return pair;
#endif
}

// The sums of two pairs.
template <class T>
DEVICE u32 add_pairs(u32 x, u32 y) {
#ifdef EMULATED
    const float2 a = unpack<T>(x), b = unpack<T>(y);
    return pack<T>(a.x + b.x, a.y + b.y);
#else
    u32 pair;
    if constexpr (is_same<T, bf16>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(x), "r"(0x3f803f80u), "r"(y));  // x * 1 + y
    else
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
    return pair;
#endif
}

// (x & mask) | bits, in one instruction.
DEVICE u32 and_or(u32 x, u32 mask, u32 bits) {
#ifdef EMULATED
    return (x & mask) | bits;
#else
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
#endif
}

// Four bytes of eight: byte i of the result is the byte of `low` (0 to 3) or `high` (4 to 7) that digit i of `which` names,
// a hexadecimal digit below 8. Digits from the fifth on are ignored.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 which) {
#ifdef EMULATED
    const u64 bytes = u64(high) << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= u32(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
#else
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(which));
    return result;
#endif
}

// Two fp8, in the lower 16 bits of `two`, as a pair of 16-bit floats. Exact: T has every value of an fp8.
template <class T, class F8>
DEVICE u32 widen(u32 two) {
    const float first = to_float(F8{u8(two)}), second = to_float(F8{u8(two >> 8)});
    return pack<T>(first, second);
}

// ---------------------------------------------------------------- arithmetic

// 2^x, to about 2 ulp; subnormal results are 0.
DEVICE float exp2_approx(float x) {
#ifdef EMULATED
    const float y = std::exp2(x);
    return y < 1.1754944e-38f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// tanh to about 2^-11 relative.
DEVICE float tanh_approx(float x) {
#ifdef EMULATED
    return std::tanh(x);
#else
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// x, hidden from the optimizer: values derived from it are recomputed instead of kept in registers through a loop.
DEVICE int opaque(int x) {
#ifndef EMULATED
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// ---------------------------------------------------------------- tensor cores: m16n8k16
// Lane l = 4 g + t. A [16 x 16]: a[i] holds the pair at row g + 8 (i & 1), columns 2 t + 8 (i >> 1).
// B [16 x 8]: b[i] the pair at rows 2 t + 8 i, column g. D [16 x 8]: d[i] at row g + 8 (i >> 1), column 2 t + (i & 1).
// `mma` adds A B to D, `multiply` sets D to A B. With elements of 8 bits it is m16n8k32: a pair of bytes, which are
// neighbouring columns, is in the place of each element, so that a[i] and b[i] hold the same bits of a row in memory.

#ifdef EMULATED

template <class T>
DEVICE void mma(float d[4], const u32 a[4], const u32 b[2]) {
    struct { u32 a[4], b[2]; } mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    auto lanes = emulated::meet(ALL_LANES, mine, "mma");
    auto element = [&](int lane, int word, int half) {
        const float2 pair = unpack<T>(reinterpret_cast<const u32*>(lanes[lane])[word]);
        return half ? pair.y : pair.x;
    };
    const int group = emulated::current->lane >> 2, t = emulated::current->lane & 3;
    for (int i = 0; i < 4; i++) {
        const int row = group + 8 * (i >> 1), column = 2 * t + (i & 1);
        for (int k = 0; k < 16; k++) {
            const float x = element((row & 7) * 4 + ((k & 7) >> 1), (row >> 3) + 2 * (k >> 3), k & 1);
            const float y = element(column * 4 + ((k & 7) >> 1), 4 + (k >> 3), k & 1);
            d[i] += x * y;
        }
    }
}
// Of bytes; `value` makes a number of one.
template <class Sum, class Value>
DEVICE void mma_bytes(Sum d[4], const u32 a[4], const u32 b[2], Value value) {
    struct { u32 a[4], b[2]; } mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    auto lanes = emulated::meet(ALL_LANES, mine, "mma");
    auto element = [&](int lane, int word, int byte) {
        return value(u8(reinterpret_cast<const u32*>(lanes[lane])[word] >> 8 * byte));
    };
    const int group = emulated::current->lane >> 2, t = emulated::current->lane & 3;
    for (int i = 0; i < 4; i++) {
        const int row = group + 8 * (i >> 1), column = 2 * t + (i & 1);
        for (int k = 0; k < 32; k++) {
            const Sum x = element((row & 7) * 4 + ((k & 15) >> 2), (row >> 3) + 2 * (k >> 4), k & 3);
            d[i] += x * element(column * 4 + ((k & 15) >> 2), 4 + (k >> 4), k & 3);
        }
    }
}
template <class T>
DEVICE void mma(int d[4], const u32 a[4], const u32 b[2]) {
    mma_bytes(d, a, b, [](u8 byte) { return int(static_cast<signed char>(byte)); });
}
template <>
DEVICE void mma<e4m3x2>(float d[4], const u32 a[4], const u32 b[2]) {
    mma_bytes(d, a, b, [](u8 byte) { return fp8_value(e4m3{byte}); });
}
template <class T>
DEVICE void multiply(float d[4], const u32 a[4], const u32 b[2]) {
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    mma<T>(d, a, b);
}

#else

template <class T> DEVICE void mma(float d[4], const u32 a[4], const u32 b[2]);
template <class T> DEVICE void multiply(float d[4], const u32 a[4], const u32 b[2]);
template <> DEVICE void multiply<bf16>(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
template <> DEVICE void multiply<fp16>(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
template <class T>
DEVICE void mma(int d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> DEVICE void multiply<e4m3x2>(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
template <> DEVICE void mma<e4m3x2>(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> DEVICE void mma<bf16>(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> DEVICE void mma<fp16>(float d[4], const u32 a[4], const u32 b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

// ---------------------------------------------------------------- matrices from shared memory to fragments
// Lane 8 i + r gives the address of row r of matrix i (8 rows of 16 bytes). Lane 4 g + t receives, of each matrix,
// the pair at row g, columns 2 t; transposed, the pair at rows 2 t, column g.

#ifdef EMULATED

template <int N, bool TRANSPOSED>
DEVICE void load_matrices(u32* out, const void* row) {
    emulated::check_aligned(row, 16, "ldmatrix");
    auto lanes = emulated::meet(ALL_LANES, row, "ldmatrix");
    const int group = emulated::current->lane >> 2, t = emulated::current->lane & 3;
    for (int i = 0; i < N; i++) {
        u16 pair[2];
        for (int j = 0; j < 2; j++) {
            const int r = TRANSPOSED ? 2 * t + j : group, c = TRANSPOSED ? group : 2 * t + j;
            const char* element = emulated::value_of<const char*>(lanes, 8 * i + r) + 2 * c;
            emulated::touch(element, 2, emulated::Touch::READ);
            memcpy(&pair[j], element, 2);
        }
        out[i] = pair[0] | u32(pair[1]) << 16;
    }
}
DEVICE void ldmatrix_x4(u32 out[4], const void* row) { load_matrices<4, false>(out, row); }
DEVICE void ldmatrix_x4_transposed(u32 out[4], const void* row) { load_matrices<4, true>(out, row); }
DEVICE void ldmatrix_x2(u32 out[2], const void* row) { load_matrices<2, false>(out, row); }
DEVICE void ldmatrix_x2_transposed(u32 out[2], const void* row) { load_matrices<2, true>(out, row); }

DEVICE u32 shared_address(const void* p) { return u32(static_cast<const char*>(p) - emulated::block.shared); }

#else

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
DEVICE void ldmatrix_x4(u32 out[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void ldmatrix_x4_transposed(u32 out[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void ldmatrix_x2(u32 out[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1]) : "r"(shared_address(row)) : "memory");
}
DEVICE void ldmatrix_x2_transposed(u32 out[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1]) : "r"(shared_address(row)) : "memory");
}

#endif

// ---------------------------------------------------------------- asynchronous copies to shared memory
// A thread's copies since its last commit form a group. After wait_for_copies<N> all but its last N groups are visible to
// this thread, and after a barrier to others. If `reads` is false, the source is not read and zeros are written.

#ifdef EMULATED

DEVICE void copy_async(void* target, const void* source, int bytes, bool reads) {
    emulated::check_aligned(target, bytes, "cp.async");
    emulated::check_aligned(source, bytes, "cp.async");
    emulated::touch(target, bytes, emulated::Touch::WRITE);
    memset(target, 0xFF, bytes);  // NaN until the thread waits for it
    emulated::current->open.push_back({target, source, bytes, reads ? bytes : 0});
}
DEVICE void copy_async_16(void* target, const void* source, bool reads) { copy_async(target, source, 16, reads); }
DEVICE void copy_async_8(void* target, const void* source, bool reads) { copy_async(target, source, 8, reads); }
DEVICE void copy_async_4(void* target, const void* source, bool reads) { copy_async(target, source, 4, reads); }
DEVICE void commit_copies() {
    emulated::current->groups.push_back(emulated::current->open);
    emulated::current->open.clear();
}
template <int N>
DEVICE void wait_for_copies() {
    auto& groups = emulated::current->groups;
    for (; groups.size() > size_t(N); groups.erase(groups.begin()))
        for (const emulated::Copy& copy : groups[0]) {
            emulated::touch(copy.target, copy.bytes, emulated::Touch::WRITE);
            memset(copy.target, 0, copy.bytes);
            memcpy(copy.target, copy.source, copy.kept);
            emulated::current->unfenced = true;
        }
}

#else

DEVICE void copy_async_16(void* target, const void* source, bool reads) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(target)), "l"(source), "r"(reads ? 16 : 0) : "memory");
}
DEVICE void copy_async_8(void* target, const void* source, bool reads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(shared_address(target)), "l"(source), "r"(reads ? 8 : 0) : "memory");
}
DEVICE void copy_async_4(void* target, const void* source, bool reads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared_address(target)), "l"(source), "r"(reads ? 4 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

#endif

// ---------------------------------------------------------------- barriers and shared memory

// A barrier, number 1 to 15, for `num_threads` threads, a multiple of 32.
DEVICE void barrier(int number, int num_threads) {
#ifdef EMULATED
    emulated::barrier(number, num_threads, "barrier");
#else
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(num_threads) : "memory");
#endif
}

// The block's dynamic shared memory, aligned to 1024 bytes. (The emulation aligns it to 128 if its size is no multiple.)
DEVICE unsigned char* shared_memory() {
#ifdef EMULATED
    return reinterpret_cast<unsigned char*>(emulated::block.shared);
#else
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
#endif
}

// ---------------------------------------------------------------- sums over lanes

// The sum over each WIDTH neighbouring lanes, in every lane.
template <int WIDTH = 32>
DEVICE float sum_lanes(float x) {
#pragma unroll
    for (int bits = WIDTH / 2; bits; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}
template <int WIDTH = 32>
DEVICE u32 max_lanes(u32 x) {
#pragma unroll
    for (int bits = WIDTH / 2; bits; bits /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, bits));
    return x;
}
template <int WIDTH = 32>
DEVICE float max_lanes(float x) {
#pragma unroll
    for (int bits = WIDTH / 2; bits; bits /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, bits));
    return x;
}
