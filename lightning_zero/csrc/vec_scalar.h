// One lane. The portable kernels are made of it, and so is the ragged end of every other instruction set, which is why
// it has to give the very bits that the vector instructions give.
//
// Included inside an anonymous namespace, once per instruction set: the same inline function compiled with other flags
// must not be merged by the linker, or a processor without AVX would be handed AVX code.

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, sizeof b); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, sizeof x); return x; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(fp16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = x.bits & 0x7fffu;
    // Subnormals: the value is magnitude * 2^-24, exact in float.
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u : 0u);
    return float_of(sign | (magnitude < 0x0400u ? small : magnitude < 0x7c00u ? normal : special));
}

// Round to nearest even; every NaN becomes the one quiet NaN that torch's scalar conversion gives.
inline void from_float(float x, bf16* out) {
    const uint32_t b = bits_of(x);
    const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    out->bits = static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Round to nearest even; NaNs keep their sign and leading bits, as the hardware conversion does.
inline void from_float(float x, fp16* out) {
    const uint32_t b = bits_of(x);
    const uint32_t sign = (b >> 16) & 0x8000u;
    const uint32_t magnitude = b & 0x7fffffffu;
    // Below 2^-14 the result is a multiple of 2^-24: adding 0.5 puts that multiple into the low bits of the sum, rounded.
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x01ffu);
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
    half = magnitude > 0x7f800000u ? nan : half;
    out->bits = static_cast<uint16_t>(sign | half);
}

#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
inline float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// Without the instruction: the product is exact in double, but the sum is rounded there, and a second time to float. That
// misleads only where the first rounding lands half-way between two floats (the low 29 bits say so), or where the result
// is subnormal. There the sum is first made odd: one step towards its error, unless it was exact or odd already.
inline float fused_multiply_add(float a, float b, float c) {
    const double product = static_cast<double>(a) * b;
    double sum = product + c;
    int64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    const bool subnormal = __builtin_fabs(sum) < 0x1p-126;
    if (__builtin_expect((bits & 0x1fffffff) == 0x10000000 || subnormal, 0)) {
        const double from_c = sum - product;
        const double error = (product - (sum - from_c)) + (c - from_c);
        if (error != 0 && (bits & 1) == 0) {
            bits += (error > 0) == (sum > 0) ? 1 : -1;
            std::memcpy(&sum, &bits, sizeof sum);
        }
    }
    return static_cast<float>(sum);
}
#endif

struct Scalar {
    static constexpr int width = 1;
    using reg = float;

    static reg set1(float x) { return x; }
    template <class T>
    static reg load(const T* x) { return to_float(*x); }
    static void store(float* out, reg x) { *out = x; }
    template <class T>
    static void store(T* out, reg x) { from_float(x, out); }
    static void stream(float* out, reg x) { *out = x; }
    template <class T>
    static void stream(T* out, reg x) { from_float(x, out); }
    static void stream_fence() {}

    static reg add(reg a, reg b) { return a + b; }
    static reg sub(reg a, reg b) { return a - b; }
    static reg mul(reg a, reg b) { return a * b; }
    static reg div(reg a, reg b) { return a / b; }
    static reg sqrt(reg a) { return __builtin_sqrtf(a); }
    static reg fma(reg a, reg b, reg c) { return fused_multiply_add(a, b, c); }
    static reg max(reg a, reg b) { return a > b || a != a ? a : b; }  // a NaN on either side wins, as in torch

    static reg exponent_of_low_bits(reg x) { return float_of(bits_of(x) << 23); }

    using acc = double;
    static acc acc_load(const double* x) { return *x; }
    static void acc_store(double* out, acc x) { *out = x; }
    static void acc_add_square(acc* sum, reg x) { *sum += static_cast<double>(x) * x; }
};
