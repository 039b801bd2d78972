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
// and u = keep_noise instead. A row whose logits are all NaN or -inf stays masked,
// with top_p < 1 also one that holds +inf.
//
// Bytes: 2 V for each row that is filled, and 8 for one that is not: rows that stay masked never read their logits. The
// usual chain (float, divide, top-k, softmax, draw, where) moves 25 to 30 MB for 64 rows of 8192; this one at most 1 MB.
// Instructions (sm_87, halves): 37 a logit for the race, 11 of them Philox's, and 9 more where top_p < 1; top-k takes 5
// for each of its 16 or 32 counts.
//
// log E and the likelihoods come from the GPU's approximate log2 and exp2. The score of an id that can win is exact to
// 1e-5, so that of 100,000 draws about one falls otherwise than with exact logarithms.
//
// One block owns a row and holds its logits in shared memory: 33 KB. Top-k is a binary search over the bits of the k-th
// largest logit. Top-p needs no sort: where the ids likelier than the winner have top_p or more of the probability, the
// winner lies outside the set, and the race is run again, with the same noise, among those likelier ones. Gumbel's
// order makes this the arg-max over the set itself. Only a few rows are filled in a step, each on a multiprocessor of
// its own; to split a row over several blocks, they would have to meet in memory after each race.

#include "device.cuh"

namespace {

constexpr int THREADS = 512, BYTES = 32768;

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

// In (0, 1); small values are exact to 2^-32.
__device__ inline float uniform(uint32_t word) { return fminf(word * 0x1p-32f + 0x1p-33f, 0.99999994f); }

// log2 E of an exponential random number E = -log2(1 - u), in units of ln 2. It is a small E that wins: below u = 1/16,
// where 1 - u loses digits, it is the series log2(e) (u + u^2 / 2 + u^3 / 3 + ...).
__device__ inline float log2_exponential(uint32_t word) {
    float u = uniform(word);
    float series = u * (1.442695f + u * (0.7213475f + u * (0.48089835f + u * (0.36067376f + u * 0.288539f))));
    return fast_log2(u < 0.0625f ? series : -fast_log2(1 - u));
}

// Larger keys are larger logits, also where they are negative.
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

// The sum over the block; every thread gets it. `room` has a place for each warp.
template <class T>
__device__ inline T block_sum(T x, T *room) {
    for (int lanes = 16; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
    __syncthreads();  // the room may still be read
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (int i = 1; i < THREADS / 32; ++i) x += room[i];
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
struct alignas(4 * sizeof(T)) Four {  // logits that share a call of Philox
    T x[4];
};

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

    // the row, up to a multiple of four, and -inf for what is not allowed
    const T *from = a.logits + (int64_t)row * a.stride;
    constexpr int CHUNK = 16 / sizeof(T);
    struct alignas(16) Chunk {
        T x[CHUNK];
    };
    const int whole = (uintptr_t)from % 16 ? 0 : a.vocab / CHUNK * CHUNK;
    for (int i = thread * CHUNK; i < whole; i += THREADS * CHUNK) *(Chunk *)(logit + i) = *(const Chunk *)(from + i);
    for (int i = whole + thread; i < a.vocab; i += THREADS) logit[i] = from[i];
    if (thread < (-a.vocab & 3)) put(logit[a.vocab + thread], -INFINITY);
    __syncthreads();
    for (int i = thread; i < a.banned; i += THREADS)
        if (a.ban[i] >= 0 && a.ban[i] < a.vocab) put(logit[a.ban[i]], -INFINITY);
    __syncthreads();
    if (a.top_k > 0 && a.top_k < a.vocab) {
        uint32_t key = 0;
        for (int bit = BITS - 1; bit >= 0; --bit) {
            float trial = value_of_key<T>(key | 1u << bit);
            int count = 0;
            for (int first = 4 * thread; first < a.vocab; first += 4 * THREADS) {
                Four<T> four = *(const Four<T> *)(logit + first);
#pragma unroll
                for (int j = 0; j < 4; ++j) count += to_float(four.x[j]) >= trial;
            }
            if (block_sum(count, ints) >= a.top_k) key |= 1u << bit;
        }
        const float kth = value_of_key<T>(key);  // NaN if the k-th logit is the -inf of a banned id: nothing is dropped
        for (int i = thread; i < a.vocab; i += THREADS)
            if (to_float(logit[i]) < kth) put(logit[i], -INFINITY);
        __syncthreads();
    }

    const bool draws = a.temperature > 0;
    const float scale = draws ? 1.44269504f / a.temperature : 1.f;  // the race is run in powers of two
    float above = -INFINITY;                                        // ids must be likelier than this
    Best best;
    while (true) {
        best = {-INFINITY, NONE};
        for (int first = 4 * thread; first < a.vocab; first += 4 * THREADS) {
            Four<T> four = *(const Four<T> *)(logit + first);
            float log_e[4] = {};
            if (draws && a.noise) {
                for (int j = 0; j < 4 && first + j < a.vocab; ++j)
                    log_e[j] = fast_log2(-logf(a.noise[(int64_t)row * a.stride + first + j]));
            } else if (draws) {
                Philox words = philox(first / 4, row, step, 0, seed);
#pragma unroll
                for (int j = 0; j < 4; ++j) log_e[j] = log2_exponential(words.word[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // a thread's ids ascend: of equals the first one stays
                float x = to_float(four.x[j]), score = x * scale - log_e[j];
                if (x > above && score > best.score) best = {score, first + j};
            }
        }
        best = block_best(best, bests);
        if (best.id == NONE || !draws || a.top_p >= 1) break;
        // Likelihoods in units of the winner's: noise lifts a logit by at most 2^34, so that none overflows.
        const float won = to_float(logit[best.id]);
        float likelier = 0, rest = 0;
        for (int first = 4 * thread; first < a.vocab; first += 4 * THREADS) {
            Four<T> four = *(const Four<T> *)(logit + first);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x = to_float(four.x[j]), likelihood = fast_exp2((x - won) * scale);
                if (x > won) likelier += likelihood;
                if (x <= won) rest += likelihood;
            }
        }
        likelier = block_sum(likelier, floats);
        rest = block_sum(rest, floats);
        if (likelier < fmaxf(a.top_p, 1e-9f) * (likelier + rest)) break;
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
