// The kernels as host code: compiled with EMULATE defined, linked to bind.cpp as csrc/_kernels_emu.
#include "attention.cu"
#include "pointwise.cu"
#include "sampler.cu"

extern "C" void set_eager_copies(bool on) { emulation::eager_copies = on; }
