// The kernels as host code: compiled with EMULATE defined, linked to bind.cpp as csrc/_kernels_emu.
#include "attention.cu"
#include "pointwise.cu"
#include "sampler.cu"

extern "C" void set_eager_copies(bool on) { emulation::eager_copies = on; }

// For tests: the logarithms of many random numbers.
extern "C" const char *log2_exponentials(const void *words, void *out, int count) {
    for (int i = 0; i < count; ++i) ((float *)out)[i] = log2_exponential(((const uint32_t *)words)[i]);
    return nullptr;
}
