// The loops, written once over a vector type `V` and compiled for each instruction set. Included inside an anonymous
// namespace after vec_scalar.h (which says why) and the definition of V.

constexpr int kSumLanes = 16;  // at least the widest vector; a multiple of every width
constexpr int kLineLanes = 32;  // 16-bit elements in a cache line

// Elements ahead. Arithmetic fills the window in which loads would otherwise run ahead; measured from memory, prefetching
// takes a tenth off the step and, for 16-bit gradients, half off the sum.
constexpr int kStepPrefetch = 512;
constexpr int kSumPrefetch = 2048;

template <class V>
struct AdamRegisters {
    typename V::reg grad_scale, decay, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, negative_step_size;

    explicit AdamRegisters(const AdamFactors& f)
        : grad_scale(V::set1(f.grad_scale)),
          decay(V::set1(f.decay)),
          lerp_weight(V::set1(f.one_minus_beta1 < 0.5f ? f.one_minus_beta1 : f.one_minus_beta1 - 1.0f)),
          beta2(V::set1(f.beta2)),
          one_minus_beta2(V::set1(f.one_minus_beta2)),
          bias_correction2_sqrt(V::set1(f.bias_correction2_sqrt)),
          eps(V::set1(f.eps)),
          negative_step_size(V::set1(f.negative_step_size)) {}
};

template <class Grad, class Copy>
struct AdamPointers {
    float* __restrict param;
    float* __restrict exp_avg;
    float* __restrict exp_avg_sq;
    float* __restrict max_exp_avg_sq;
    const Grad* __restrict grad;
    Copy* __restrict copy;
};

// Updates V::width elements at i and returns the new parameters.
template <class V, bool kCoupled, bool kAmsgrad, class Grad, class Copy>
inline __attribute__((always_inline)) typename V::reg adam_vector(
    const AdamRegisters<V>& k, bool lerp_from_exp_avg, const AdamPointers<Grad, Copy>& x, int64_t i) {
    using reg = typename V::reg;
    if (V::width > 1) {
        __builtin_prefetch(x.grad + i + kStepPrefetch);
        __builtin_prefetch(x.param + i + kStepPrefetch, 1);
        __builtin_prefetch(x.exp_avg + i + kStepPrefetch, 1);
        __builtin_prefetch(x.exp_avg_sq + i + kStepPrefetch, 1);
    }
    reg grad = V::mul(V::load(x.grad + i), k.grad_scale);
    reg param = V::load(x.param + i);
    if (kCoupled) {
        grad = V::fma(param, k.decay, grad);
    } else {
        param = V::mul(param, k.decay);
    }
    const reg old_exp_avg = V::load(x.exp_avg + i);
    const reg difference = V::sub(grad, old_exp_avg);
    const reg exp_avg = V::fma(k.lerp_weight, difference, lerp_from_exp_avg ? old_exp_avg : grad);
    reg exp_avg_sq = V::mul(V::load(x.exp_avg_sq + i), k.beta2);
    exp_avg_sq = V::fma(V::mul(k.one_minus_beta2, grad), grad, exp_avg_sq);
    V::store(x.exp_avg + i, exp_avg);
    V::store(x.exp_avg_sq + i, exp_avg_sq);
    if (kAmsgrad) {
        exp_avg_sq = V::max(V::load(x.max_exp_avg_sq + i), exp_avg_sq);
        V::store(x.max_exp_avg_sq + i, exp_avg_sq);
    }
    const reg denominator = V::add(V::div(V::sqrt(exp_avg_sq), k.bias_correction2_sqrt), k.eps);
    param = V::add(param, V::div(V::mul(k.negative_step_size, exp_avg), denominator));
    V::store(x.param + i, param);
    return param;
}

template <class Copy>
constexpr bool kHasCopy = true;
template <>
constexpr bool kHasCopy<float> = false;  // a float "copy" would be the parameter itself: stands for none

template <class V, bool kCoupled, bool kAmsgrad, class Grad, class Copy>
void adam_range(const AdamFactors& f, const AdamBuffers& b, int64_t begin, int64_t end) {
    const AdamPointers<Grad, Copy> x = {
        b.param, b.exp_avg, b.exp_avg_sq, b.max_exp_avg_sq, static_cast<const Grad*>(b.grad), static_cast<Copy*>(b.copy)};
    const bool lerp_from_exp_avg = f.one_minus_beta1 < 0.5f;
    const AdamRegisters<Scalar> one(f);
    const AdamRegisters<V> many(f);
    int64_t i = begin;

    const auto single = [&](int64_t j) {
        const float param = adam_vector<Scalar, kCoupled, kAmsgrad>(one, lerp_from_exp_avg, x, j);
        if constexpr (kHasCopy<Copy>) Scalar::store(x.copy + j, param);
    };

    if constexpr (kHasCopy<Copy>) {
        if (b.stream_copy) {
            // Streaming stores need alignment, and are fast only where whole cache lines are written at once.
            while (i < end && reinterpret_cast<uintptr_t>(x.copy + i) % (kLineLanes * sizeof(Copy)) != 0) single(i++);
            for (; i + kLineLanes <= end; i += kLineLanes) {
                typename V::reg line[kLineLanes / V::width];
                for (int j = 0; j < kLineLanes / V::width; ++j) {
                    line[j] = adam_vector<V, kCoupled, kAmsgrad>(many, lerp_from_exp_avg, x, i + j * V::width);
                }
                for (int j = 0; j < kLineLanes / V::width; ++j) V::stream(x.copy + i + j * V::width, line[j]);
            }
            V::stream_fence();
        }
    }
    LIGHTNING_ZERO_INDEPENDENT_ITERATIONS
    for (; i + V::width <= end; i += V::width) {
        const typename V::reg param = adam_vector<V, kCoupled, kAmsgrad>(many, lerp_from_exp_avg, x, i);
        if constexpr (kHasCopy<Copy>) V::store(x.copy + i, param);
    }
    for (; i < end; ++i) single(i);
}

template <class V, class Grad, class Copy>
void adam_options(const AdamFactors& f, const AdamBuffers& b, int64_t begin, int64_t end) {
    const bool amsgrad = b.max_exp_avg_sq != nullptr;
    if (f.coupled) {
        return amsgrad ? adam_range<V, true, true, Grad, Copy>(f, b, begin, end)
                       : adam_range<V, true, false, Grad, Copy>(f, b, begin, end);
    }
    return amsgrad ? adam_range<V, false, true, Grad, Copy>(f, b, begin, end)
                   : adam_range<V, false, false, Grad, Copy>(f, b, begin, end);
}

template <class V, class Grad>
void adam_copy(const AdamFactors& f, const AdamBuffers& b, int64_t begin, int64_t end) {
    switch (b.copy_dtype) {
        case DType::kBFloat16: return adam_options<V, Grad, bf16>(f, b, begin, end);
        case DType::kFloat16: return adam_options<V, Grad, fp16>(f, b, begin, end);
        default: return adam_options<V, Grad, float>(f, b, begin, end);
    }
}

template <class V>
void adam_grad(const AdamFactors& f, const AdamBuffers& b, int64_t begin, int64_t end) {
    switch (b.grad_dtype) {
        case DType::kBFloat16: return adam_copy<V, bf16>(f, b, begin, end);
        case DType::kFloat16: return adam_copy<V, fp16>(f, b, begin, end);
        default: return adam_copy<V, float>(f, b, begin, end);
    }
}

// Copies around the cache: nobody reads undo data soon, if ever. Whole cache lines, as streaming stores need.
template <class V>
void copy_aside(const float* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i < count && reinterpret_cast<uintptr_t>(to + i) % 64 != 0; ++i) to[i] = from[i];
    for (; i + kSumLanes <= count; i += kSumLanes) {
        __builtin_prefetch(from + i + kStepPrefetch, 1);
        for (int j = 0; j < kSumLanes; j += V::width) V::stream(to + i + j, V::load(from + i + j));
    }
    for (; i < count; ++i) to[i] = from[i];
}

// With undo, a block at a time: what copy_aside has read, the step finds in the cache.
template <class V>
void adam(const AdamFactors& f, const AdamBuffers& b, int64_t begin, int64_t end) {
    if (b.undo == nullptr) return adam_grad<V>(f, b, begin, end);
    constexpr int64_t kBlock = 4096;
    const float* const old[] = {b.param, b.exp_avg, b.exp_avg_sq, b.max_exp_avg_sq};
    for (int64_t start = begin; start < end; start += kBlock) {
        const int64_t stop = end - start < kBlock ? end : start + kBlock;
        for (int k = 0; k < 4 && old[k] != nullptr; ++k) {
            copy_aside<V>(old[k] + start, b.undo + k * b.undo_stride + start, stop - start);
        }
        adam_grad<V>(f, b, start, stop);
    }
    V::stream_fence();
}

// Sixteen double sums, element i in lane i % 16 whatever the vector width, joined as a fixed tree.
template <class V, class Grad>
double sum_of_squares_range(const Grad* grad, int64_t begin, int64_t end) {
    constexpr int kVectors = kSumLanes / V::width;
    double lanes[kSumLanes] = {};
    typename V::acc sums[kVectors];
    for (int j = 0; j < kVectors; ++j) sums[j] = V::acc_load(lanes + j * V::width);
    int64_t i = begin;
    for (; i + kSumLanes <= end; i += kSumLanes) {
        __builtin_prefetch(grad + i + kSumPrefetch);
        for (int j = 0; j < kVectors; ++j) V::acc_add_square(&sums[j], V::load(grad + i + j * V::width));
    }
    for (int j = 0; j < kVectors; ++j) V::acc_store(lanes + j * V::width, sums[j]);
    for (int j = 0; i < end; ++i, ++j) Scalar::acc_add_square(&lanes[j], Scalar::load(grad + i));
    for (int half = kSumLanes / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
}

template <class V>
double sum_of_squares(const void* grad, DType dtype, int64_t begin, int64_t end) {
    switch (dtype) {
        case DType::kBFloat16: return sum_of_squares_range<V>(static_cast<const bf16*>(grad), begin, end);
        case DType::kFloat16: return sum_of_squares_range<V>(static_cast<const fp16*>(grad), begin, end);
        default: return sum_of_squares_range<V>(static_cast<const float*>(grad), begin, end);
    }
}

// Infinities and NaNs are the values whose exponent is all ones. Plain integers: compilers vectorise this by themselves.
template <class Bits>
bool any_exponent_full(const Bits* x, int64_t begin, int64_t end, Bits exponent) {
    constexpr int64_t kBlock = 4096;  // between looks at the verdict, so that a bad gradient ends the search early
    for (int64_t start = begin; start < end; start += kBlock) {
        const int64_t stop = end - start < kBlock ? end : start + kBlock;
        Bits found = 0;
        for (int64_t i = start; i < stop; ++i) found |= static_cast<Bits>((x[i] & exponent) == exponent);
        if (found) return true;
    }
    return false;
}

inline bool has_nonfinite(const void* grad, DType dtype, int64_t begin, int64_t end) {
    switch (dtype) {
        case DType::kBFloat16: return any_exponent_full<uint16_t>(static_cast<const uint16_t*>(grad), begin, end, 0x7f80u);
        case DType::kFloat16: return any_exponent_full<uint16_t>(static_cast<const uint16_t*>(grad), begin, end, 0x7c00u);
        default: return any_exponent_full<uint32_t>(static_cast<const uint32_t*>(grad), begin, end, 0x7f800000u);
    }
}

// Rounded a block at a time and compared as words, which compilers vectorise by themselves.
template <class V, class Copy>
bool is_copy_range(const float* exact, const Copy* copy, int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 512;
    alignas(64) Copy rounded[kBlock];
    for (int64_t start = begin; start < end; start += kBlock) {
        const int64_t count = end - start < kBlock ? end - start : kBlock;
        const float* from = exact + start;
        int64_t i = 0;
        for (; i + V::width <= count; i += V::width) {
            __builtin_prefetch(from + i + kSumPrefetch);
            V::store(rounded + i, V::load(from + i));
        }
        for (; i < count; ++i) Scalar::store(rounded + i, Scalar::load(from + i));
        if (std::memcmp(rounded, copy + start, static_cast<size_t>(count) * sizeof(Copy)) != 0) return false;
    }
    return true;
}

template <class V>
bool is_copy(const float* exact, const void* copy, DType dtype, int64_t begin, int64_t end) {
    return dtype == DType::kBFloat16 ? is_copy_range<V>(exact, static_cast<const bf16*>(copy), begin, end)
                                     : is_copy_range<V>(exact, static_cast<const fp16*>(copy), begin, end);
}

#include "coded_blocks_body.h"
#include "cross_entropy_body.h"

template <class V>
constexpr KernelTable kTable = {&adam<V>,          &sum_of_squares<V>, &has_nonfinite, &is_copy<V>,
                                &cross_entropy<V>, &scale_rows<V>,     &encode<V>,     &decode<V>};
