// The kernels as Python functions of pointers, sizes and a stream. No header of torch: it builds in seconds, and one
// build serves every version of torch. ops.py checks the arguments; nothing here does.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

extern "C" {
const char *attention(const void *, const void *, const void *, const void *, const void *, void *, void *, int, int,
                      int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int, void *);
const char *add_norm(const void *, const void *, const void *, const void *, void *, void *, int, int, float, void *);
const char *bias_gelu(const void *, const void *, void *, int, int, bool, void *);
const char *sample(const void *, bool, void *, const void *, const void *, const void *, const void *, const void *,
                   int, int, int, int, int, int64_t, float, float, void *);
#ifdef EMULATE
void set_eager_copies(bool);
const char *log2_exponentials(const void *, void *, int);
#endif
}

namespace {

// In a function's Python form pointers are integers, and what it says is wrong becomes a RuntimeError.
template <class T>
struct Wire {
    using type = T;
    static T pass(T x) { return x; }
};
template <class T>
struct Wire<T *> {
    using type = uintptr_t;
    static T *pass(uintptr_t x) { return reinterpret_cast<T *>(x); }
};

template <class... A>
auto wrap(const char *(*function)(A...)) {
    return [function](typename Wire<A>::type... arguments) {
        if (const char *wrong = function(Wire<A>::pass(arguments)...)) throw std::runtime_error(wrong);
    };
}

}  // namespace

PYBIND11_MODULE(MODULE, m) {
    m.def("attention", wrap(attention));
    m.def("add_norm", wrap(add_norm));
    m.def("bias_gelu", wrap(bias_gelu));
    m.def("sample", wrap(sample));
    m.attr("arch") = ARCH;      // compute capabilities, "87" or "87;90"
    m.attr("source") = SOURCE;  // digest of the sources that this was built from
#ifdef EMULATE
    m.def("set_eager_copies", set_eager_copies);
    m.def("log2_exponentials", wrap(log2_exponentials));
#endif
}
