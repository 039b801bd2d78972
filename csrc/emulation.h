// A CPU stand-in for device.cuh: coroutines stand in for the CUDA threads of a block, and blocks run one after another.
//
// What keeps it honest: a warp runs ahead until it must wait, for its own lanes in a shuffle or a matrix instruction and
// for the block in __syncthreads(). Shared memory holds large numbers when a block starts, or NaN, which comparisons
// may hide; copy_async16 lands at once, or not before copy_wait. `eager_copies` says which, and a kernel must be right
// both ways. A lane that leaves early, or a barrier that not all threads reach, ends in an error instead of a hang. Not
// checked: bank conflicts, registers, time, and weak memory order.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define SHARED(type, name, count)         \
    alignas(128) static type name[count]; \
    emulation::poison(name, sizeof name)

struct half_t {
    uint16_t bits;
};

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx(0), blockIdx(0), gridDim(1), blockDim(1);

// ---- halves: 1 sign bit, 5 exponent bits, 10 fraction bits ----

inline float decode_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? ldexpf(fraction, -24)
                                 : ldexpf(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}

inline float to_float(half_t x) {
    static const std::vector<float> table = [] {
        std::vector<float> all(1 << 16);
        for (int i = 0; i < 1 << 16; ++i) all[i] = decode_half(i);
        return all;
    }();
    return table[x.bits];
}

// Rounded to nearest, ties to even.
inline half_t to_half(float x) {
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return {0x7fff};
    x = fabsf(x);
    if (x >= 65520) return {uint16_t(sign | 0x7c00)};
    int exponent = x < 0x1p-14f ? -14 : ilogbf(x);
    float steps = nearbyintf(ldexpf(x, 10 - exponent));  // in units of the last place; 2048 carries into the exponent
    return {uint16_t(sign | ((x < 0x1p-14f ? 0 : (exponent + 14) << 10) + int(steps)))};
}

inline uint32_t pack2(float low, float high) { return to_half(low).bits | (uint32_t)to_half(high).bits << 16; }
inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float from_bits(uint32_t bits, half_t) { return to_float({(uint16_t)bits}); }
inline float from_bits(uint32_t bits, float) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t mul_high(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }

// These are as far off as the PTX manual allows a GPU to be, up or down by the bits of x.
inline float allowed_error(float x) { return bits_of(x) * 0x9E3779B9u >> 31 ? 0x1p-22f : -0x1p-22f; }
inline float fast_exp2(float x) { return exp2f(x) * (1 + allowed_error(x)); }
inline float fast_reciprocal(float x) { return 1 / x * (1 + allowed_error(x)); }
inline float fast_log2(float x) {
    return x > 0.5f && x < 2 ? log2f(x) + allowed_error(x) : log2f(x) * (1 + allowed_error(x));
}

// ---- coroutines in the place of threads ----

namespace emulation {

struct Copy {
    void *to;
    const void *from;
    bool valid;
    void land() const { valid ? memcpy(to, from, 16) : memset(to, 0, 16); }
};

struct Barrier {
    int arrived = 0, turn = 0;
};

struct Warp {
    Barrier barrier;
    uint32_t word[32];
    const half_t *row[32];
    float a[32][8], b[32][4];
};

struct Thread {
    ucontext_t context;  // to start with
    jmp_buf state;       // to go on with
    bool started = false, done = false;
    std::vector<std::vector<Copy>> groups{1};  // copies under way; the last group is still open
};

inline bool eager_copies = false;
inline const char *error = nullptr;
inline jmp_buf home;
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline std::vector<char> stacks;
inline std::vector<void *> poisoned;
inline std::function<void()> body;
inline Barrier block;
inline int current, idle;
constexpr size_t STACK = 1 << 16;

inline int lane() { return current % 32; }
inline Warp &warp() { return warps[current / 32]; }

inline void poison(void *array, size_t bytes) {
    for (void *p : poisoned)
        if (p == array) return;
    poisoned.push_back(array);
    memset(array, eager_copies ? 0x7b : 0xff, bytes);  // large numbers, or NaN, in every type of ours
}

// Does not return. A jump costs no system call, as a switch of contexts does: it is for the signal mask.
inline void resume(Thread &thread) {
    if (thread.started) _longjmp(thread.state, 1);
    thread.started = true;
    setcontext(&thread.context);
}

// Give up the CPU to the next thread that is not done: in the same warp, or anywhere in the block.
inline void yield(bool within_warp) {
    int me = current, first = within_warp ? me / 32 * 32 : 0, count = within_warp ? 32 : threads.size(), next = me;
    do next = first + (next - first + 1) % count;
    while (threads[next].done && next != me);
    if (next == me || ++idle > 64 * (int)threads.size()) {
        error = "emulation: a thread waits for others that never arrive";
        _longjmp(home, 1);
    }
    current = next;
    if (!_setjmp(threads[me].state)) resume(threads[next]);
    current = me;
    threadIdx.x = me;
}

// Addresses of 16-byte accesses are multiples of 16, or a GPU faults.
inline void check_aligned(const void *address) {
    if ((uintptr_t)address % 16 == 0) return;
    error = "emulation: an address is not a multiple of 16 bytes";
    _longjmp(home, 1);
}

inline void wait(Barrier &barrier, int all, bool within_warp) {
    int turn = barrier.turn;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        ++barrier.turn;
        idle = 0;
    }
    while (barrier.turn == turn) yield(within_warp);
}

inline void warp_wait() { wait(warp().barrier, 32, true); }

inline void thread_main() {
    int me = current;
    threadIdx.x = me;
    body();
    threads[me].done = true;
    idle = 0;
    for (int i = 1; i < (int)threads.size(); ++i) {
        int next = (me + i) % threads.size();
        if (!threads[next].done) {
            current = next;
            threadIdx.x = next;
            resume(threads[next]);
        }
    }
    _longjmp(home, 1);
}

inline const char *run(dim3 grid, int count) {
    stacks.resize(STACK * count);
    gridDim = grid;
    blockDim = dim3(count);
    error = nullptr;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                threads.assign(count, {});
                warps.assign((count + 31) / 32, {});
                poisoned.clear();
                block = {};
                current = idle = 0;
                for (int i = 0; i < count; ++i) {
                    getcontext(&threads[i].context);
                    threads[i].context.uc_stack.ss_sp = &stacks[STACK * i];
                    threads[i].context.uc_stack.ss_size = STACK;
                    makecontext(&threads[i].context, thread_main, 0);
                }
                if (!_setjmp(home)) resume(threads[0]);
                if (error) return error;
            }
    return nullptr;
}

}  // namespace emulation

template <class... P, class... A>
const char *launch(void (*kernel)(P...), dim3 grid, int threads, void *, A... arguments) {
    emulation::body = [=] { kernel(arguments...); };
    return emulation::run(grid, threads);
}

// ---- what threads do together ----

inline void __syncthreads() {
    emulation::warp_wait();  // all lanes finish what stands before the barrier, else none of them runs ahead of the block
    emulation::wait(emulation::block, emulation::threads.size(), false);
}

template <class T>
inline T shuffle_xor(T x, int lanes) {
    static_assert(sizeof(T) == 4, "words of 32 bits");
    using namespace emulation;
    memcpy(&warp().word[lane()], &x, 4);
    warp_wait();
    T other;
    memcpy(&other, &warp().word[lane() ^ lanes], 4);
    warp_wait();
    return other;
}

inline uint32_t vote(bool x) {
    using namespace emulation;
    warp().word[lane()] = x;
    warp_wait();
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= warp().word[i] << i;
    warp_wait();
    return bits;
}

inline void copy_async16(void *shared, const void *global, bool valid) {
    emulation::check_aligned(shared);
    emulation::check_aligned(global);
    emulation::Copy copy{shared, global, valid};
    if (emulation::eager_copies)
        copy.land();
    else
        emulation::threads[emulation::current].groups.back().push_back(copy);
}

inline void copy_commit() { emulation::threads[emulation::current].groups.emplace_back(); }

template <int N>
inline void copy_wait() {
    auto &groups = emulation::threads[emulation::current].groups;
    while ((int)groups.size() > N + 1) {
        for (const auto &copy : groups[0]) copy.land();
        groups.erase(groups.begin());
    }
}

inline void load_matrix4(uint32_t *fragment, const half_t *row) {
    using namespace emulation;
    check_aligned(row);
    warp().row[lane()] = row;
    warp_wait();
    for (int i = 0; i < 4; ++i) {
        const half_t *from = warp().row[8 * i + lane() / 4] + 2 * (lane() % 4);
        fragment[i] = from[0].bits | (uint32_t)from[1].bits << 16;
    }
    warp_wait();
}

inline void load_matrix4_transposed(uint32_t *fragment, const half_t *row) {
    using namespace emulation;
    check_aligned(row);
    warp().row[lane()] = row;
    warp_wait();
    for (int i = 0; i < 4; ++i) {
        int from = 8 * i + 2 * (lane() % 4), column = lane() / 4;
        fragment[i] = warp().row[from][column].bits | (uint32_t)warp().row[from + 1][column].bits << 16;
    }
    warp_wait();
}

// Lane 4 g + t holds a at rows g, g + 8 and columns 2 t, 2 t + 1, and these + 8; b at rows 2 t, 2 t + 1, and these + 8,
// of column g; c at rows g, g + 8 and columns 2 t, 2 t + 1.
inline void multiply_add_16x8x16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    using namespace emulation;
    Warp &w = warp();
    for (int i = 0; i < 8; ++i) w.a[lane()][i] = to_float({uint16_t(a[i / 2] >> 16 * (i % 2))});
    for (int i = 0; i < 4; ++i) w.b[lane()][i] = to_float({uint16_t((i < 2 ? b0 : b1) >> 16 * (i % 2))});
    warp_wait();
    int g = lane() / 4, t = lane() % 4;
    for (int e = 0; e < 4; ++e) {
        int lower = e / 2, column = 2 * t + e % 2;
        for (int k = 0; k < 16; ++k) {
            int holder = k % 8 / 2, right = k / 8;
            c[e] += w.a[4 * g + holder][4 * right + 2 * lower + k % 2] * w.b[4 * column + holder][2 * right + k % 2];
        }
    }
    warp_wait();
}
