// One denoising step of masked diffusion behind the logits: which masked positions to fill, and with what.
//
//     a masked row r is filled unless u[r] < keep[step]                                            (ancestral step)
//     token[r] = argmax over the allowed ids v of  logits[r,v] / temperature - log E[r,v],  E exponential   (Gumbel)
//     allowed: v < vocab, not in the ban list, among the top k, then in the smallest set of the rest, likeliest first,
//     whose probability reaches top_p (equals are in together, as in model_mdlm.draw). Temperature 0: the likeliest id.
//
// Shapes: logits [R, V] halves or floats, V at most 16384 halves or 8192 floats; token [R] int64, changed in place;
// state [2] int64 on the device: seed and step, so that a CUDA graph can be replayed; keep [steps] floats; ban [K] int32.
// u and E come from Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (id / 4, row, step, 0 for E and
// 1 for u): no state, the same on every device. With noise and keep_noise (uniforms in (0, 1)) not null, E = -log noise
// and u = keep_noise instead. A row whose logits are all NaN or -inf stays masked.
//
// Bytes: 2 V for each row that is filled, and 8 for one that is not: rows that stay masked never read their logits. The
// usual chain (float, divide, top-k, softmax, draw, where) moves 25 to 30 MB for 64 rows of 8192; this one at most 1 MB.
// Flops: about 60 a logit, most of them Philox's integers.
//
// One block owns a row and holds its logits in shared memory: 33 KB. Top-k is a binary search over the bits of the k-th
// largest logit, 16 or 32 counts. Top-p needs no sort: where the ids likelier than the winner have top_p or more, the
// winner lies outside the set, and the race is run again, with the same noise, among those likelier ones. Gumbel's
// order makes this the arg-max over the set itself.

#include "device.cuh"

namespace {

constexpr int THREADS = 256, BYTES = 32768;

struct Philox {
    uint32_t word[4];
};

__device__ inline Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        uint32_t high0 = mul_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        uint32_t high1 = mul_high(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// In (0, 1); small values are exact to 2^-32, and it is a small E that wins.
__device__ inline float uniform(uint32_t word) { return fminf((word + 0.5f) * 0x1p-32f, 0.99999994f); }

// Larger logits have larger keys, also where they are negative.
__device__ inline uint32_t key_of(half_t x) { return bits_of(x) ^ (bits_of(x) >> 15 ? 0xffffu : 0x8000u); }
__device__ inline uint32_t key_of(float x) { return bits_of(x) ^ (bits_of(x) >> 31 ? 0xffffffffu : 0x80000000u); }

template <class T>
__device__ inline float value_of_key(uint32_t key) {
    uint32_t sign = sizeof(T) == 2 ? 0x8000u : 0x80000000u, all = sizeof(T) == 2 ? 0xffffu : 0xffffffffu;
    return from_bits(key & sign ? key ^ sign : key ^ all, T{});
}

struct Best {
    float score;
    int id;
};

// Higher scores first, then lower ids.
__device__ inline Best better(Best a, Best b) {
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

struct Add {
    template <class T>
    __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Combined over the block; every thread gets the result. `room` has a place for each warp.
template <class T, class Op>
__device__ inline T block_reduce(T x, Op op, T *room) {
    for (int lanes = 16; lanes; lanes /= 2) x = op(x, shuffle_xor(x, lanes));
    __syncthreads();  // the room may still be read
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (int i = 1; i < THREADS / 32; ++i) x = op(x, room[i]);
    return x;
}

__device__ inline Best block_best(Best x, Best *room) {
    for (int lanes = 16; lanes; lanes /= 2) x = better(x, {shuffle_xor(x.score, lanes), shuffle_xor(x.id, lanes)});
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (int i = 1; i < THREADS / 32; ++i) x = better(x, room[i]);
    return x;
}

template <class T>
struct Sample {
    const T *logits;
    int64_t *token;
    const int64_t *state;
    const float *keep;
    const int *ban;
    const float *noise, *keep_noise;
    int vocab, stride, banned, top_k;  // ids that exist; logits in a row; length of the ban list
    int64_t mask;
    float temperature, top_p;
};

template <class T>
__global__ void __launch_bounds__(THREADS) sample_kernel(Sample<T> a) {
    constexpr int BITS = 8 * sizeof(T), NONE = 0x7fffffff;
    SHARED(T, logit, BYTES / sizeof(T));
    SHARED(float, floats, THREADS / 32);
    SHARED(int, ints, THREADS / 32);
    SHARED(Best, bests, THREADS / 32);
    const int row = blockIdx.x, thread = threadIdx.x;
    const uint64_t seed = a.state[0];
    const uint32_t step = (uint32_t)a.state[1];
    if (a.token[row] != a.mask) return;
    float u = a.keep_noise ? a.keep_noise[row] : uniform(philox(0, row, step, 1, seed).word[0]);
    if (u < a.keep[step]) return;

    const T *from = a.logits + (int64_t)row * a.stride;
    constexpr int CHUNK = 16 / sizeof(T);
    struct alignas(16) Chunk {
        T x[CHUNK];
    };
    const int whole = (uintptr_t)from % 16 ? 0 : a.vocab / CHUNK * CHUNK;
    for (int i = thread * CHUNK; i < whole; i += THREADS * CHUNK) *(Chunk *)(logit + i) = *(const Chunk *)(from + i);
    for (int i = whole + thread; i < a.vocab; i += THREADS) logit[i] = from[i];
    __syncthreads();
    for (int i = thread; i < a.banned; i += THREADS)
        if (a.ban[i] >= 0 && a.ban[i] < a.vocab) put(logit[a.ban[i]], -INFINITY);
    __syncthreads();

    float kth = -INFINITY;  // ids with a lower logit are out
    if (a.top_k > 0 && a.top_k < a.vocab) {
        uint32_t key = 0;
        for (int bit = BITS - 1; bit >= 0; --bit) {
            uint32_t trial = key | 1u << bit;
            int count = 0;
            for (int i = thread; i < a.vocab; i += THREADS) count += key_of(logit[i]) >= trial;
            if (block_reduce(count, Add{}, ints) >= a.top_k) key = trial;
        }
        kth = value_of_key<T>(key);
    }

    const float warmth = a.temperature > 0 ? a.temperature : 1.f;
    float most = -INFINITY;
    for (int i = thread; i < a.vocab; i += THREADS) most = fmaxf(most, to_float(logit[i]));
    most = block_reduce(most, Max{}, floats);

    float above = -INFINITY, total = 0;  // ids must be likelier than `above`
    Best best;
    while (true) {
        best = {-INFINITY, NONE};
        float part = 0;
        for (int first = 4 * thread; first < a.vocab; first += 4 * THREADS) {
            Philox words = a.temperature > 0 && !a.noise ? philox(first / 4, row, step, 0, seed) : Philox{};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int id = first + j;
                if (id >= a.vocab) break;
                float x = to_float(logit[id]);
                if (!(x >= kth && x > above)) continue;
                part += expf((x - most) / warmth);
                float score = x;
                if (a.temperature > 0) {
                    float e = a.noise ? -logf(a.noise[(int64_t)row * a.stride + id]) : -log1pf(-uniform(words.word[j]));
                    score = x / a.temperature - logf(e);
                }
                best = better(best, {score, id});
            }
        }
        best = block_best(best, bests);
        if (best.id == NONE || a.temperature == 0 || a.top_p >= 1) break;
        if (above == -INFINITY) total = block_reduce(part, Add{}, floats);
        const float won = to_float(logit[best.id]);
        float likelier = 0;
        for (int i = thread; i < a.vocab; i += THREADS) {
            float x = to_float(logit[i]);
            likelier += x >= kth && x > won ? expf((x - most) / warmth) : 0.f;
        }
        if (block_reduce(likelier, Add{}, floats) < fmaxf(a.top_p, 1e-9f) * total) break;
        above = won;
    }
    if (thread == 0 && best.id != NONE) a.token[row] = best.id;
}

template <class T>
const char *start(const void *logits, void *token, const void *state, const void *keep, const void *ban,
                  const void *noise, const void *keep_noise, int rows, int vocab, int stride, int banned, int top_k,
                  int64_t mask, float temperature, float top_p, void *stream) {
    Sample<T> a{(const T *)logits,       (int64_t *)token,          (const int64_t *)state, (const float *)keep,
                (const int *)ban,        (const float *)noise,      (const float *)keep_noise,
                vocab, stride, banned, top_k, mask, temperature, top_p};
    return launch(sample_kernel<T>, dim3(rows), THREADS, stream, a);
}

}  // namespace

extern "C" const char *sample(const void *logits, bool half_logits, void *token, const void *state, const void *keep,
                              const void *ban, const void *noise, const void *keep_noise, int rows, int vocab,
                              int stride, int banned, int top_k, int64_t mask, float temperature, float top_p,
                              void *stream) {
    auto go = half_logits ? start<half_t> : start<float>;
    return go(logits, token, state, keep, ban, noise, keep_noise, rows, vocab, stride, banned, top_k, mask,
              temperature, top_p, stream);
}
