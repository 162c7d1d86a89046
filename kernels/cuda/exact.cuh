// Arithmetic with the same bits on every device and in PyTorch: rounded to nearest after every operation, never
// contracted, and with subnormal numbers, independently of the compiler's options.
#pragma once

#include "ptx.cuh"

#ifdef EMULATED

DEVICE float add_exact(float a, float b) { return a + b; }
DEVICE float subtract_exact(float a, float b) { return a - b; }
DEVICE float multiply_exact(float a, float b) { return a * b; }
DEVICE float divide_exact(float a, float b) { return a / b; }
DEVICE double multiply_exact(double a, double b) { return a * b; }
DEVICE double round_up(double a) { return std::ceil(a); }
DEVICE u64 multiply_high(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }

#else

DEVICE float add_exact(float a, float b) {
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
DEVICE float subtract_exact(float a, float b) {
    float c;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
DEVICE float multiply_exact(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
DEVICE float divide_exact(float a, float b) {
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
DEVICE double multiply_exact(double a, double b) {
    double c;
    asm("mul.rn.f64 %0, %1, %2;" : "=d"(c) : "d"(a), "d"(b));
    return c;
}
DEVICE double round_up(double a) {
    double b;
    asm("cvt.rpi.f64.f64 %0, %1;" : "=d"(b) : "d"(a));
    return b;
}
DEVICE u64 multiply_high(u64 a, u64 b) {
    u64 c;
    asm("mul.hi.u64 %0, %1, %2;" : "=l"(c) : "l"(a), "l"(b));
    return c;
}

#endif
