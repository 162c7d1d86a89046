// The part of CUDA that the kernels use, emulated on a CPU. One OS thread runs everything: a CUDA thread is a fiber,
// which yields only where it must wait for other threads. Blocks run one after another.
//
// The emulation tests logic: indices, masks, barriers, which lane holds which value. It does not test the order in which
// blocks see global memory, bank conflicts or approximate arithmetic. Compiled with RACES, it finds accesses to shared
// memory that no barrier orders, whatever the order of threads. Errors that a device would not report are reported here: a
// barrier that some threads never reach, a collective outside its mask, a misaligned access, an unmapped address.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include <sys/mman.h>

#define EMULATED 1
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

extern "C" void pagewire_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl pagewire_switch
.hidden pagewire_switch
pagewire_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#else
#error "fibers are written for x86-64"
#endif

// A copy that a thread has started and not yet waited for (cp.async).
struct Copy {
    void* target;
    const void* source;
    int bytes, kept;
};

// An exchange between the lanes of a mask: each lane brings a value and gets those of all lanes when the last arrives.
struct Meeting {
    unsigned mask = 0, arrived = 0, leaving = 0;
    uint64_t round = 0;
    uint64_t brought[32][8], seen[32][8];
};

struct Warp {
    Meeting meetings[8];
};

struct Barrier {
    int arrived = 0;
    uint64_t round = 0;
};

// A product that a warpgroup has started (wgmma). Until it waits for it nothing may touch what is named here.
struct GroupProduct {
    float* sums;           // of this thread
    const unsigned* rows;  // of this thread; null: in shared memory, as `row_panels` describes
    uint64_t row_panels, column_panels;
    int num_columns;
    bool transposed, adds;
    float (*value)(uint16_t);
};

struct Fiber {
    void* stack_pointer;
    char* stack = nullptr;
    dim3 index;
    int number, lane;
    Warp* warp;
    bool done;
    unsigned block_epoch, warp_epoch;  // barriers of all threads, and of all lanes, that it has passed
    const char* waits_for;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
    bool unfenced;  // its copies are not visible to the tensor cores of a warpgroup
    const GroupProduct* product;
    std::vector<GroupProduct> open_products;
    std::vector<std::vector<GroupProduct>> product_groups;
};

struct Block {
    dim3 index, size, grid;
    int num_threads = 0, alive = 0;
    uint64_t progress = 0;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barriers[16], group_barriers[8];
    char* shared = nullptr;
    size_t shared_bytes = 0;
    void* scheduler;
    void (*body)(const void*);
    const void* parameters;
    char error[512];
};

enum class Order { IN_ORDER, ANY_THREAD, ANY_WARP };

inline Block block;
inline Fiber* current = nullptr;
inline Order order = Order::IN_ORDER;
inline std::mt19937 random_numbers;
inline sigjmp_buf after_fault;
constexpr size_t STACK = 256 << 10, SHARED = 256 << 10, PAGE = 4096;

inline void yield() { pagewire_switch(&current->stack_pointer, block.scheduler); }

// Ends the launch with an error. Never returns: the fibers are abandoned.
[[noreturn]] inline void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(block.error, sizeof block.error, format, values);
    va_end(values);
    for (;;) yield();
}

inline void run_fiber() {
    block.body(block.parameters);
    current->done = true;
    block.alive--;
    block.progress++;
    for (;;) yield();
}

inline void wait_while(const uint64_t& round, uint64_t entered, const char* what) {
    current->waits_for = what;
    while (round == entered) yield();
    current->waits_for = nullptr;
    block.progress++;
}

// ---------------------------------------------------------------- races

enum class Touch { READ, WRITE, ATOMIC };

#ifdef RACES

#define UNTRACED __attribute__((no_sanitize("thread")))

struct Access {
    int thread = -1;
    bool atomic = false;
    unsigned block_epoch = 0, warp_epoch = 0;
};

// The last accesses to a byte. Of more than two readers the last two are kept.
struct Shadow {
    Access write, reads[2];
};

extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];  // static shared memory lies between them
inline std::vector<Shadow> of_dynamic, of_static;
inline bool touching = false;  // the compiler traces what the functions here call, too

UNTRACED inline void forget_accesses() {
    of_dynamic.assign(block.shared_bytes, Shadow());
    of_static.assign(_end - __bss_start, Shadow());
    current = nullptr;
}

// Only barriers and __syncwarp order the accesses of two threads: shuffles and ldmatrix do not.
UNTRACED inline void check_order(const Access& before, const char* first, const char* second) {
    const Fiber& me = *current;
    if (before.thread < 0 || before.thread == me.number || before.block_epoch != me.block_epoch) return;
    if (before.thread / 32 == me.number / 32 && before.warp_epoch != me.warp_epoch) return;
    touching = false;
    fail("a race: thread %d %s shared memory that thread %d %s, with no barrier between them", me.number, second,
         before.thread, first);
}

UNTRACED inline void touch_byte(Shadow& byte, Touch how) {
    const Access access{current->number, how == Touch::ATOMIC, current->block_epoch, current->warp_epoch};
    if (how != Touch::ATOMIC || !byte.write.atomic)
        check_order(byte.write, "wrote", how == Touch::READ ? "reads" : "writes");
    if (how == Touch::READ) {
        if (byte.reads[0].thread != access.thread) byte.reads[1] = byte.reads[0];
        byte.reads[0] = access;
        return;
    }
    for (const Access& read : byte.reads) check_order(read, "read", "writes");
    byte.write = access;
}

// An access of the running thread to any memory; only shared memory counts, and the emulation's own state does not.
UNTRACED inline void touch(const volatile void* address, size_t bytes, Touch how) {
    const char* at = const_cast<const char*>(static_cast<const volatile char*>(address));
    if (touching || !current || block.error[0]) return;
    touching = true;
    std::vector<Shadow>* shadows = nullptr;
    size_t place = 0;
    if (at >= block.shared && at < block.shared + block.shared_bytes) {
        shadows = &of_dynamic, place = at - block.shared;
    } else if (at >= __bss_start && at < _end) {
        auto holds = [=](const auto& own) {
            const char* start = reinterpret_cast<const char*>(&own);
            return at >= start && at < start + sizeof own;
        };
        if (holds(block) || holds(current) || holds(order) || holds(random_numbers) || holds(of_dynamic) ||
            holds(of_static) || holds(touching))
            place = 0;
        else
            shadows = &of_static, place = at - __bss_start;
    }
    for (size_t i = place; shadows && i < std::min(place + bytes, shadows->size()); i++) touch_byte((*shadows)[i], how);
    touching = false;
}

#else

#define UNTRACED
inline void forget_accesses() {}
inline void touch(const volatile void*, size_t, Touch) {}

#endif

inline void barrier(int number, int num_threads, const char* what) {
    Barrier& barrier = block.barriers[number];
    block.progress++;
    if (++barrier.arrived == num_threads) {
        barrier.arrived = 0;
        barrier.round++;
    } else {
        wait_while(barrier.round, barrier.round, what);
    }
    if (num_threads == block.num_threads) current->block_epoch++;
}

// The values of all lanes of the mask, by lane.
template <class T>
const uint64_t (*meet(unsigned mask, const T& value, const char* what))[8] {
    static_assert(sizeof(T) <= sizeof(Meeting::seen[0]) && std::is_trivially_copyable_v<T>);
    const unsigned me = 1u << current->lane;
    if (!(mask & me)) fail("%s: lane %d is not in its mask %08x", what, current->lane, mask);
    const int in_warp = std::min(32, block.num_threads - (current->number & ~31));
    if (in_warp < 32) mask &= (1u << in_warp) - 1;
    Meeting* meeting = nullptr;
    for (Meeting& m : current->warp->meetings)
        if (m.arrived && m.mask == mask && !(m.arrived & me)) meeting = &m;
    if (!meeting)
        for (Meeting& m : current->warp->meetings)
            if (!m.arrived && !m.leaving) meeting = &m;
    if (!meeting) fail("%s: too many masks meet at once", what);
    meeting->mask = mask;
    memcpy(meeting->brought[current->lane], &value, sizeof value);
    meeting->arrived |= me;
    block.progress++;
    if (meeting->arrived == mask) {
        memcpy(meeting->seen, meeting->brought, sizeof meeting->seen);
        meeting->leaving = mask;
        meeting->arrived = 0;
        meeting->round++;
    } else {
        wait_while(meeting->round, meeting->round, what);
    }
    meeting->leaving &= ~me;
    return meeting->seen;
}

template <class T>
T value_of(const uint64_t (*values)[8], int lane) {
    T value;
    memcpy(&value, values[lane & 31], sizeof value);
    return value;
}

inline void check_aligned(const void* address, int bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) fail("%s: %p is not aligned to %d", what, address, bytes);
}

// ---------------------------------------------------------------- products of a warpgroup

// Waits for the other threads of the running one's warpgroup.
inline void meet_group() {
    Barrier& barrier = block.group_barriers[current->number / 128];
    block.progress++;
    if (++barrier.arrived == 128) {
        barrier.arrived = 0;
        barrier.round++;
    } else {
        wait_while(barrier.round, barrier.round, "wgmma");
    }
}

// An element of a matrix in shared memory as a descriptor (PTX, "matrix-descriptor format") and NVIDIA's canonical layouts
// define it: in units of 16 bytes ((8, n), 2) : ((8, stride), 1) by columns of 64 elements, or transposed
// ((8, n), (8, k)) : ((1, leading), (8, stride)); bits 4 to 6 of the address are then exchanged by bits 7 to 9.
inline float element_of(const GroupProduct& product, uint64_t panels, int outer, int k, bool transposed) {
    if (panels >> 62 != 1) fail("wgmma: only an exchange over 128 bytes is emulated");
    const uint32_t start = (panels & 0x3fff) << 4, leading = (panels >> 16 & 0x3fff) << 4, stride = (panels >> 32 & 0x3fff) << 4;
    uint32_t address = start;
    if (transposed)
        address += outer / 8 % 8 * 16 + outer / 64 * leading + k % 8 * 128 + k / 8 * stride + outer % 8 * 2;
    else
        address += outer % 8 * 128 + outer / 8 * stride + k * 2;
    address ^= address >> 3 & 0x70;
    if (address + 2 > block.shared_bytes) fail("wgmma reads beyond shared memory");
    uint16_t bits;
    touch(block.shared + address, 2, Touch::READ);
    memcpy(&bits, block.shared + address, 2);
    return product.value(bits);
}

// This thread's sums of a product.
inline void compute(const GroupProduct& product) {
    current->product = &product;
    meet_group();
    const int group = current->number & ~127, warp = current->number / 32 % 4, g = current->lane / 4, t = current->lane % 4;
    float rows[2][16];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++) {
            const int row = 16 * warp + 8 * half + g;
            if (product.rows) {
                const Fiber& owner = block.fibers[group + 32 * warp + 4 * g + k % 8 / 2];
                const unsigned pair = owner.product->rows[half + 2 * (k / 8)];
                rows[half][k] = product.value(uint16_t(k % 2 ? pair >> 16 : pair));
            } else {
                rows[half][k] = element_of(product, product.row_panels, row, k, false);
            }
        }
    for (int j = 0; j < product.num_columns / 8; j++)
        for (int i = 0; i < 2; i++) {
            const int column = 8 * j + 2 * t + i;
            float* const sums = product.sums + 4 * j + i;  // of two rows
            if (!product.adds) sums[0] = sums[2] = 0.0f;
            for (int k = 0; k < 16; k++) {  // in the order in which `mma` is emulated
                const float x = element_of(product, product.column_panels, column, k, product.transposed);
                for (int half = 0; half < 2; half++) sums[2 * half] += rows[half][k] * x;
            }
        }
    meet_group();
}

// A device computes it some time between its start and the wait: here at its start, or in other orders of threads at the
// wait.
inline void start_product(const GroupProduct& product) {
    if (current->unfenced) fail("wgmma: thread %d has copies that it did not fence", current->number);
    if (product.column_panels % 64 > 7 || product.row_panels % 64 > 7)
        fail("wgmma: a panel does not begin at a multiple of 1024 bytes");
    if (order == Order::IN_ORDER)
        compute(product);
    else
        current->open_products.push_back(product);
}

inline void commit_products() {
    current->product_groups.push_back(current->open_products);
    current->open_products.clear();
}

inline void wait_for_products(int pending) {
    auto& groups = current->product_groups;
    for (; groups.size() > size_t(pending); groups.erase(groups.begin()))
        for (const GroupProduct& product : groups[0]) compute(product);
}

inline void run(Fiber& fiber) {
    if (fiber.done || block.error[0]) return;
    current = &fiber;
    pagewire_switch(&block.scheduler, fiber.stack_pointer);
}

// Runs every thread up to its next wait, in any order.
inline void run_threads() {
    std::vector<int> turns(block.num_threads);
    std::iota(turns.begin(), turns.end(), 0);
    if (order != Order::IN_ORDER) std::shuffle(turns.begin(), turns.end(), random_numbers);
    for (int turn : turns) run(block.fibers[turn]);
}

// Runs one warp as far as possible while the others wait, which makes a missing barrier visible.
inline void run_one_warp() {
    std::vector<int> turns(block.warps.size());
    std::iota(turns.begin(), turns.end(), 0);
    std::shuffle(turns.begin(), turns.end(), random_numbers);
    for (int warp : turns) {
        const uint64_t before = block.progress;
        uint64_t last;
        do {
            last = block.progress;
            for (int i = warp * 32; i < std::min(block.num_threads, warp * 32 + 32); i++) run(block.fibers[i]);
        } while (block.progress != last && !block.error[0]);
        if (block.progress != before) return;
    }
}

inline void report_deadlock() {
    size_t length = snprintf(block.error, sizeof block.error, "deadlock in block (%u, %u, %u):", block.index.x,
                             block.index.y, block.index.z);
    for (const Fiber& fiber : block.fibers)
        if (!fiber.done && fiber.number < block.num_threads && length < sizeof block.error - 64)
            length += snprintf(block.error + length, sizeof block.error - length, " thread %d at %s;", fiber.number,
                               fiber.waits_for ? fiber.waits_for : "?");
}

inline void run_block() {
    memset(block.shared, 0xFF, block.shared_bytes);  // NaN until it is written
    forget_accesses();
    for (Barrier& barrier : block.barriers) barrier = Barrier();
    for (Barrier& barrier : block.group_barriers) barrier = Barrier();
    block.warps.assign((block.num_threads + 31) / 32, Warp());
    for (int i = 0; i < block.num_threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.done = false;
        fiber.block_epoch = fiber.warp_epoch = 0;
        fiber.waits_for = nullptr;
        fiber.number = i;
        fiber.lane = i % 32;
        fiber.warp = &block.warps[i / 32];
        fiber.open.clear();
        fiber.groups.clear();
        fiber.unfenced = false;
        fiber.open_products.clear();
        fiber.product_groups.clear();
        fiber.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
        void** top = reinterpret_cast<void**>(fiber.stack + STACK - 64);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&run_fiber);
        for (int k = 0; k < 6; k++) *--top = nullptr;  // the registers that a switch restores
        fiber.stack_pointer = top;
    }
    block.alive = block.num_threads;
    while (block.alive && !block.error[0]) {
        const uint64_t before = block.progress;
        order == Order::ANY_WARP ? run_one_warp() : run_threads();
        if (block.progress == before && block.alive && !block.error[0]) report_deadlock();
    }
}

// The compiler's check of alignment ends in an instruction that there is none of.
inline void on_fault(int signal, siginfo_t* info, void*) {
    char what[64] = "a misaligned access";
    if (signal != SIGILL) snprintf(what, sizeof what, "no memory at %p", info->si_addr);
    snprintf(block.error, sizeof block.error, "block (%u, %u, %u), thread %d: %s", block.index.x, block.index.y,
             block.index.z, current ? current->number : -1, what);
    siglongjmp(after_fault, 1);
}

// Anonymous memory between two pages that cannot be accessed.
inline char* guarded(size_t bytes) {
    char* memory = static_cast<char*>(mmap(nullptr, bytes + 2 * PAGE, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(memory, PAGE, PROT_NONE);
    mprotect(memory + PAGE + bytes, PAGE, PROT_NONE);
    return memory + PAGE;
}

inline const char* run_grid(dim3 grid, dim3 size, size_t shared_bytes, void (*body)(const void*), const void* parameters) {
    static char* shared = guarded(SHARED);
    static char* signal_stack = guarded(STACK);
    block.grid = grid;
    block.size = size;
    block.num_threads = size.x * size.y * size.z;
    block.body = body;
    block.parameters = parameters;
    block.error[0] = 0;
    if (block.num_threads > 1024 || shared_bytes > 227 << 10 || grid.y > 65535 || grid.z > 65535)
        return "over a device's limits of threads per block, blocks of a grid or shared memory";
    block.shared_bytes = (shared_bytes + 127) / 128 * 128;
    block.shared = shared + SHARED - block.shared_bytes;  // the page behind it cannot be accessed
    if (block.fibers.size() < size_t(block.num_threads)) block.fibers.resize(block.num_threads);
    for (Fiber& fiber : block.fibers)
        if (!fiber.stack) fiber.stack = guarded(STACK);

    struct sigaction action = {}, old_segv, old_bus, old_ill;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    stack_t alternative = {signal_stack, 0, STACK}, old_stack;
    sigaltstack(&alternative, &old_stack);
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    sigaction(SIGILL, &action, &old_ill);
    std::vector<unsigned> blocks(size_t(grid.x) * grid.y * grid.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    if (order != Order::IN_ORDER) std::shuffle(blocks.begin(), blocks.end(), random_numbers);
    if (!sigsetjmp(after_fault, 1))
        for (unsigned i : blocks) {
            block.index = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
            run_block();
            if (block.error[0]) break;
        }
    current = nullptr;
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaction(SIGILL, &old_ill, nullptr);
    sigaltstack(&old_stack, nullptr);
    return block.error[0] ? block.error : nullptr;
}

template <class P>
const char* launch(void (*)(P), void (*body)(const void*), dim3 grid, dim3 size, size_t shared, const void* parameters,
                   size_t bytes) {
    if (bytes != sizeof(P)) return "the parameters have another size than the kernel's";
    return run_grid(grid, size, shared, body, parameters);
}

template <class P>
void call(void (*kernel)(P), const void* parameters) {
    kernel(*static_cast<const std::remove_reference_t<P>*>(parameters));
}

// Defines `run`, which runs a kernel with one parameter, a struct, and returns null or an error message.
#define EMULATED_KERNEL(...)                                                                                          \
    extern "C" __attribute__((visibility("default"))) const char* run(const unsigned* g, const unsigned* b,           \
                                                                      size_t shared, const void* p, size_t bytes) {   \
        return emulated::launch(                                                                                      \
            __VA_ARGS__, [](const void* p) { emulated::call(__VA_ARGS__, p); }, dim3{g[0], g[1], g[2]},               \
            dim3{b[0], b[1], b[2]}, shared, p, bytes);                                                                \
    }

}  // namespace emulated

extern "C" inline __attribute__((used, visibility("default"))) void set_order(int order, unsigned seed) {
    emulated::order = emulated::Order(order);
    emulated::random_numbers.seed(seed);
}

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::block.index)
#define blockDim (emulated::block.size)
#define gridDim (emulated::block.grid)
constexpr int warpSize = 32;

inline void __syncthreads() { emulated::barrier(0, emulated::block.num_threads, "__syncthreads"); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulated::meet(mask, 0, "__syncwarp");
    if (mask == 0xffffffffu) emulated::current->warp_epoch++;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = emulated::current->lane;
    auto values = emulated::meet(mask, value, "__shfl_sync");
    return emulated::value_of<T>(values, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int = 32) {
    const int lane = emulated::current->lane;
    return emulated::value_of<T>(emulated::meet(mask, value, "__shfl_xor_sync"), lane ^ bits);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
    const int lane = emulated::current->lane;
    auto values = emulated::meet(mask, value, "__shfl_down_sync");
    return emulated::value_of<T>(values, lane % width + by < width ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
    const int lane = emulated::current->lane;
    auto values = emulated::meet(mask, value, "__shfl_up_sync");
    return emulated::value_of<T>(values, lane % width >= by ? lane - by : lane);
}

namespace emulated {
template <class T, class F>
T reduce(unsigned mask, T value, F combine, const char* what) {
    auto values = meet(mask, value, what);
    bool first = true;
    T result{};
    const int in_warp = std::min(32, block.num_threads - (current->number & ~31));
    for (int lane = 0; lane < in_warp; lane++) {
        if (!(mask >> lane & 1)) continue;
        const T other = value_of<T>(values, lane);
        result = first ? other : combine(result, other);
        first = false;
    }
    return result;
}
}  // namespace emulated

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned bit = predicate ? 1u << emulated::current->lane : 0;
    return emulated::reduce(mask, bit, [](unsigned a, unsigned b) { return a | b; }, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
    auto values = emulated::meet(mask, value, "__match_any_sync");
    unsigned same = 0;
    for (int lane = 0; lane < 32; lane++)
        if ((mask >> lane & 1) && emulated::value_of<T>(values, lane) == value) same |= 1u << lane;
    return same;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
    return emulated::reduce(mask, value, [](T a, T b) { return T(a + b); }, "__reduce_add_sync");
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
    return emulated::reduce(mask, value, [](T a, T b) { return std::max(a, b); }, "__reduce_max_sync");
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
    return emulated::reduce(mask, value, [](T a, T b) { return std::min(a, b); }, "__reduce_min_sync");
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return emulated::reduce(mask, value, [](unsigned a, unsigned b) { return a | b; }, "__reduce_or_sync");
}
UNTRACED inline int __syncthreads_count(int predicate) {
    static int counts[2];  // alternating: the next count may begin before all threads have read this one
    const int now = emulated::block.barriers[0].round & 1;
    if (!emulated::block.barriers[0].arrived) counts[now] = 0;
    counts[now] += predicate != 0;
    __syncthreads();
    return counts[now];
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }

#ifdef RACES
// What the compiler calls before each access, if it looks for races between threads.
#define TRACED(name, bytes, how) \
    extern "C" UNTRACED __attribute__((used)) void __tsan_##name(void* p) { emulated::touch(p, bytes, emulated::Touch::how); }
#define TRACED_SIZES(bytes) \
    TRACED(read##bytes, bytes, READ) TRACED(write##bytes, bytes, WRITE) \
    TRACED(unaligned_read##bytes, bytes, READ) TRACED(unaligned_write##bytes, bytes, WRITE)
TRACED_SIZES(1) TRACED_SIZES(2) TRACED_SIZES(4) TRACED_SIZES(8) TRACED_SIZES(16)
extern "C" UNTRACED __attribute__((used)) void __tsan_read_range(void* p, size_t n) {
    emulated::touch(p, n, emulated::Touch::READ);
}
extern "C" UNTRACED __attribute__((used)) void __tsan_write_range(void* p, size_t n) {
    emulated::touch(p, n, emulated::Touch::WRITE);
}
extern "C" UNTRACED __attribute__((used)) void __tsan_func_entry(void*) {}
extern "C" UNTRACED __attribute__((used)) void __tsan_func_exit() {}
extern "C" UNTRACED __attribute__((used)) void __tsan_init() {}
extern "C" UNTRACED __attribute__((used)) unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) {
    return *p;  // of static variables that may have to be initialized
}
#endif

// Atomic because a fiber yields only where it waits.
template <class T, class U>
UNTRACED T atomicAdd(T* p, U value) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); T old = *p; *p = T(old + value); return old; }
template <class T, class U>
UNTRACED T atomicMax(T* p, U value) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); T old = *p; *p = std::max(old, T(value)); return old; }
template <class T, class U>
UNTRACED T atomicMin(T* p, U value) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); T old = *p; *p = std::min(old, T(value)); return old; }
template <class T, class U>
UNTRACED T atomicOr(T* p, U value) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); T old = *p; *p = old | T(value); return old; }
template <class T, class U>
UNTRACED T atomicExch(T* p, U value) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); T old = *p; *p = T(value); return old; }
template <class T, class U, class V>
UNTRACED T atomicCAS(T* p, U compare, V value) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); T old = *p; if (old == T(compare)) *p = T(value); return old; }
UNTRACED inline unsigned atomicInc(unsigned* p, unsigned last) { emulated::touch(p, sizeof *p, emulated::Touch::ATOMIC); unsigned old = *p; *p = old >= last ? 0 : old + 1; return old; }

template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T value) { *p = value; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
inline int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline unsigned long long __double2ull_rn(double x) { return (unsigned long long)std::nearbyint(x); }
template <class T, class U>
constexpr std::common_type_t<T, U> min(T a, U b) { using C = std::common_type_t<T, U>; return C(b) < C(a) ? C(b) : C(a); }
template <class T, class U>
constexpr std::common_type_t<T, U> max(T a, U b) { using C = std::common_type_t<T, U>; return C(a) < C(b) ? C(b) : C(a); }
