// The kernels for 64-bit Arm, where Advanced SIMD and its fused multiply-add are always there.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstring>

namespace lightning_zero {
namespace {

#define LIGHTNING_ZERO_INDEPENDENT_ITERATIONS
#include "vec_scalar.h"

struct Neon {
    static constexpr int width = 4;
    using reg = float32x4_t;

    static reg set1(float x) { return vdupq_n_f32(x); }
    static reg load(const float* x) { return vld1q_f32(x); }
    static reg load(const bf16* x) { return vreinterpretq_f32_u32(vshll_n_u16(load4(x), 16)); }
    static reg load(const fp16* x) { return vcvt_f32_f16(vreinterpret_f16_u16(load4(x))); }
    static void store(float* out, reg x) { vst1q_f32(out, x); }
    template <class T>
    static void store(T* out, reg x) { vst1_u16(reinterpret_cast<uint16_t*>(out), to16(x, out)); }
    // The architecture has no streaming store that is worth it at this width.
    template <class T>
    static void stream(T* out, reg x) { store(out, x); }
    static void stream_fence() {}

    static reg add(reg a, reg b) { return vaddq_f32(a, b); }
    static reg sub(reg a, reg b) { return vsubq_f32(a, b); }
    static reg mul(reg a, reg b) { return vmulq_f32(a, b); }
    static reg div(reg a, reg b) { return vdivq_f32(a, b); }
    static reg sqrt(reg a) { return vsqrtq_f32(a); }
    static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
    static reg max(reg a, reg b) { return vmaxq_f32(a, b); }

    static reg exponent_of_low_bits(reg x) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 23));
    }

    struct acc { float64x2_t low, high; };
    static acc acc_load(const double* x) { return {vld1q_f64(x), vld1q_f64(x + 2)}; }
    static void acc_store(double* out, acc x) {
        vst1q_f64(out, x.low);
        vst1q_f64(out + 2, x.high);
    }
    static void acc_add_square(acc* sum, reg x) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(x));
        const float64x2_t high = vcvt_high_f64_f32(x);
        sum->low = vfmaq_f64(sum->low, low, low);  // the square is exact in double, so this equals mul and add
        sum->high = vfmaq_f64(sum->high, high, high);
    }

private:
    static uint16x4_t load4(const void* x) { return vld1_u16(static_cast<const uint16_t*>(x)); }

    static uint16x4_t to16(reg x, const fp16*) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
    static uint16x4_t to16(reg x, const bf16*) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
        return vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc0)));
    }
};

#include "kernel_body.h"

}  // namespace

const KernelTable* neon_kernels() { return &kTable<Neon>; }

}  // namespace lightning_zero
#else
const lightning_zero::KernelTable* lightning_zero::neon_kernels() { return nullptr; }
#endif
