// The memory traffic of an Adam step with next to no arithmetic: the least time that any such step can take here.
//
// Same streams, vectors, prefetches, stores and threads as the kernels, whose sources it includes; compile with
// -march=native. `scale` is passed as zero at run time, so nothing changes and nothing can be optimised away.
#if defined(__AVX512F__)
#include "../lightning_zero/csrc/isa_avx512.cpp"
#elif defined(__AVX2__)
#include "../lightning_zero/csrc/isa_avx2.cpp"
#elif defined(__aarch64__)
#include "../lightning_zero/csrc/isa_neon.cpp"
#else
#include "../lightning_zero/csrc/isa_portable.cpp"
#endif
#include "../lightning_zero/csrc/parallel.h"

namespace lightning_zero {
namespace {

#if defined(__AVX512F__)
using Widest = Avx512;
#elif defined(__AVX2__)
using Widest = Avx2;
#elif defined(__aarch64__)
using Widest = Neon;
#else
using Widest = Scalar;
#endif

template <class V, class Grad, class Copy>
void roof(float* param, float* exp_avg, float* exp_avg_sq, const Grad* grad, Copy* copy, float scale, int64_t begin, int64_t end) {
    const typename V::reg factor = V::set1(scale);
    for (int64_t i = begin; i + kLineLanes <= end; i += kLineLanes) {
        typename V::reg line[kLineLanes / V::width];
        for (int j = 0; j < kLineLanes / V::width; ++j) {
            const int64_t k = i + j * V::width;
            __builtin_prefetch(grad + k + kStepPrefetch);
            __builtin_prefetch(param + k + kStepPrefetch, 1);
            __builtin_prefetch(exp_avg + k + kStepPrefetch, 1);
            __builtin_prefetch(exp_avg_sq + k + kStepPrefetch, 1);
            const typename V::reg change = V::mul(V::load(grad + k), factor);
            V::store(exp_avg + k, V::add(V::load(exp_avg + k), change));
            V::store(exp_avg_sq + k, V::add(V::load(exp_avg_sq + k), change));
            line[j] = V::add(V::load(param + k), change);
            V::store(param + k, line[j]);
        }
        if constexpr (kHasCopy<Copy>) {
            for (int j = 0; j < kLineLanes / V::width; ++j) V::stream(copy + i + j * V::width, line[j]);
        }
    }
    V::stream_fence();
}

template <class Grad, class Copy>
void threaded_roof(float* param, float* exp_avg, float* exp_avg_sq, const void* grad, void* copy, float scale, int64_t numel,
                   int num_threads) {
    parallel_for(numel, num_threads, 1 << 17, 64, [&](int64_t begin, int64_t end) {
        roof<Widest>(param, exp_avg, exp_avg_sq, static_cast<const Grad*>(grad), static_cast<Copy*>(copy), scale, begin, end);
    });
}

}  // namespace
}  // namespace lightning_zero

using namespace lightning_zero;

extern "C" void roof_fp32(float* p, float* m, float* v, const void* grad, float scale, int64_t numel, int num_threads) {
    threaded_roof<float, float>(p, m, v, grad, nullptr, scale, numel, num_threads);
}

// numel a multiple of 32 and copy aligned to a cache line.
extern "C" void roof_bf16(float* p, float* m, float* v, const void* grad, void* copy, float scale, int64_t numel, int num_threads) {
    threaded_roof<bf16, bf16>(p, m, v, grad, copy, scale, numel, num_threads);
}
