// The kernels for x86-64 with AVX-512 F, BW, DQ and VL. Only this file is compiled with those flags.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

#include <cstring>

namespace lightning_zero {
namespace {

#define LIGHTNING_ZERO_INDEPENDENT_ITERATIONS
#include "vec_scalar.h"

struct Avx512 {
    static constexpr int width = 16;
    using reg = __m512;

    static reg set1(float x) { return _mm512_set1_ps(x); }
    static reg load(const float* x) { return _mm512_loadu_ps(x); }
    static reg load(const bf16* x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(x)), 16));
    }
    static reg load(const fp16* x) { return _mm512_cvtph_ps(load16(x)); }
    static void store(float* out, reg x) { _mm512_storeu_ps(out, x); }
    template <class T>
    static void store(T* out, reg x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), to16(x, out)); }
    static void stream(float* out, reg x) { _mm512_stream_ps(out, x); }
    template <class T>
    static void stream(T* out, reg x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(out), to16(x, out)); }
    static void stream_fence() { _mm_sfence(); }

    static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
    static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
    static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
    static reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
    static reg sqrt(reg a) { return _mm512_sqrt_ps(a); }
    static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
    // The instruction gives b where either is NaN; a NaN in a has to win, too.
    static reg max(reg a, reg b) {
        return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
    }

    static reg exponent_of_low_bits(reg x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
    }

    struct acc { __m512d low, high; };
    static acc acc_load(const double* x) { return {_mm512_loadu_pd(x), _mm512_loadu_pd(x + 8)}; }
    static void acc_store(double* out, acc x) {
        _mm512_storeu_pd(out, x.low);
        _mm512_storeu_pd(out + 8, x.high);
    }
    static void acc_add_square(acc* sum, reg x) {
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        sum->low = _mm512_fmadd_pd(low, low, sum->low);  // the square is exact in double, so this equals mul and add
        sum->high = _mm512_fmadd_pd(high, high, sum->high);
    }

private:
    static __m256i load16(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }

    static __m256i to16(reg x, const fp16*) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // Not the AVX512_BF16 instruction: it flushes subnormals to zero, so its bits would differ from the other paths.
    static __m256i to16(reg x, const bf16*) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
    }
};

#include "kernel_body.h"

}  // namespace

const KernelTable* avx512_kernels() { return &kTable<Avx512>; }

}  // namespace lightning_zero
#else
const lightning_zero::KernelTable* lightning_zero::avx512_kernels() { return nullptr; }
#endif
