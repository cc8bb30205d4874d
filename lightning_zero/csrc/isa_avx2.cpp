// The kernels for x86-64 with AVX2, FMA and F16C. Only this file is compiled with those flags.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <cstring>

namespace lightning_zero {
namespace {

#define LIGHTNING_ZERO_INDEPENDENT_ITERATIONS
#include "vec_scalar.h"

struct Avx2 {
    static constexpr int width = 8;
    using reg = __m256;

    static reg set1(float x) { return _mm256_set1_ps(x); }
    static reg load(const float* x) { return _mm256_loadu_ps(x); }
    static reg load(const bf16* x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load8(x)), 16));
    }
    static reg load(const fp16* x) { return _mm256_cvtph_ps(load8(x)); }
    static void store(float* out, reg x) { _mm256_storeu_ps(out, x); }
    template <class T>
    static void store(T* out, reg x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), to16(x, out)); }
    static void stream(float* out, reg x) { _mm256_stream_ps(out, x); }
    template <class T>
    static void stream(T* out, reg x) { _mm_stream_si128(reinterpret_cast<__m128i*>(out), to16(x, out)); }
    static void stream_fence() { _mm_sfence(); }

    static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
    static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
    static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
    static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
    static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
    static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
    // The instruction gives b where either is NaN; a NaN in a has to win, too.
    static reg max(reg a, reg b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }

    static reg exponent_of_low_bits(reg x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
    }

    struct acc { __m256d low, high; };
    static acc acc_load(const double* x) { return {_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)}; }
    static void acc_store(double* out, acc x) {
        _mm256_storeu_pd(out, x.low);
        _mm256_storeu_pd(out + 4, x.high);
    }
    static void acc_add_square(acc* sum, reg x) {
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        sum->low = _mm256_fmadd_pd(low, low, sum->low);  // the square is exact in double, so this equals mul and add
        sum->high = _mm256_fmadd_pd(high, high, sum->high);
    }

private:
    static __m128i load8(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }

    static __m128i to16(reg x, const fp16*) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static __m128i to16(reg x, const bf16*) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
        const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        if (__builtin_expect(_mm256_movemask_ps(nan), 0)) {  // a branch: cheaper than blending every vector
            rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
        }
        return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    }
};

#include "kernel_body.h"

}  // namespace

const KernelTable* avx2_kernels() { return &kTable<Avx2>; }

}  // namespace lightning_zero
#else
const lightning_zero::KernelTable* lightning_zero::avx2_kernels() { return nullptr; }
#endif
