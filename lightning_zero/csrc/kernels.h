// The plain interface of the CPU kernels: numbers, pointers and sizes. No Python, no torch, no global state.
//
// Every function takes the instruction set as an argument and touches nothing but the buffers it is given. Results
// depend on the values alone: not on the instruction set, the number of threads, the alignment of the buffers, or on
// how a long array is cut into calls (sum_of_squares excepted: its blocks are counted from the start of the call).
#pragma once

#include <cstdint>

namespace lightning_zero {

enum class DType : int { kNone = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

enum class Isa : int { kPortable = 0, kNeon = 1, kAvx2 = 2, kAvx512 = 3 };

// The factors of one Adam step, formed in double and rounded to float once.
//
//   grad       = grad_scale * gradient                 (negated for maximize: the sign is part of grad_scale)
//   coupled:     grad  = fma(param, decay, grad)       (decay = weight_decay)
//   decoupled:   param = param * decay                 (decay = 1 - lr * weight_decay)
//   exp_avg    = fma(1 - beta1, grad - exp_avg, exp_avg)
//   exp_avg_sq = fma((1 - beta2) * grad, grad, exp_avg_sq * beta2)
//   param      = param + (-step_size * exp_avg) / (sqrt(exp_avg_sq) / bias_correction2_sqrt + eps)
//
// These are the operations of torch's fused CPU kernel, in its order, so that the bits agree. A lerp weight of one half
// or more is taken from the other end, as torch does: exp_avg = fma(-beta1, grad - exp_avg, grad).
struct AdamFactors {
    float grad_scale;
    float decay;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float bias_correction2_sqrt;
    float eps;
    float negative_step_size;
    bool coupled;
};

// One range of parameters and what belongs to it. max_exp_avg_sq is null without amsgrad, copy is null where no 16-bit
// copy is wanted. stream_copy asks for stores of the copy that go around the cache. undo is null, or gets the old param,
// exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq, each in undo_stride elements.
struct AdamBuffers {
    float* param;
    float* exp_avg;
    float* exp_avg_sq;
    float* max_exp_avg_sq;
    const void* grad;
    void* copy;
    float* undo;
    int64_t undo_stride;
    DType grad_dtype;
    DType copy_dtype;
    bool stream_copy;
};

// Cross-entropy of rows of `classes` logits, and its gradient with respect to them:
//
//   loss = (1 - label_smoothing) * w[target] * -log p[target] + label_smoothing / classes * sum_j w[j] * -log p[j]
//   grad = grad_scale * d loss / d logits
//
// with p the softmax of the row. grad is null where only losses are wanted, and may be the logits themselves. weight is
// null where every class counts alike; weight_sum is its sum, or the number of classes. Rows whose target is
// ignore_index get zeros; every other target lies in [0, classes).
struct CrossEntropy {
    const void* logits;
    void* grad;
    DType dtype;
    int64_t classes;
    const int64_t* target;
    int64_t ignore_index;
    const float* weight;
    double weight_sum;
    double label_smoothing;
    double grad_scale;
    double* losses;
};

// Blocks of kCodedBlock numbers as int8 codes with one float scale for each block:
//
//   scale = max / 127, code = rint(x * (127 / max)), x is read back as code * scale        (max = the largest |x|)
//
// A block without a number of at least 127 times the smallest normal float has scale and codes zero. One with an infinity
// or a NaN has scale NaN, so that all of it is read back as NaN.
constexpr int64_t kCodedBlock = 256;

struct CodedBlocks {
    int8_t* codes;
    float* scales;
};

// What one instruction set provides: single-threaded loops over [begin, end); of rows for cross_entropy and scale_rows, of
// blocks for encode and decode.
struct KernelTable {
    void (*adam)(const AdamFactors&, const AdamBuffers&, int64_t begin, int64_t end);
    double (*sum_of_squares)(const void* grad, DType, int64_t begin, int64_t end);
    bool (*has_nonfinite)(const void* grad, DType, int64_t begin, int64_t end);
    bool (*is_copy)(const float* exact, const void* copy, DType, int64_t begin, int64_t end);
    void (*cross_entropy)(const CrossEntropy&, int64_t begin, int64_t end);
    void (*scale_rows)(void* x, DType, int64_t columns, const float* factors, int64_t begin, int64_t end);
    void (*encode)(const void* x, DType, const CodedBlocks&, int64_t begin, int64_t end);
    void (*decode)(const CodedBlocks&, void* x, DType, int64_t begin, int64_t end);
};

// Null where this build has no code for the instruction set.
const KernelTable* portable_kernels();
const KernelTable* neon_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

// Whether this build has code for the instruction set and this processor can run it.
bool isa_available(Isa isa);

// The threaded entry points. num_threads is a ceiling; short arrays use fewer.
void adam_step(Isa isa, const AdamFactors& factors, AdamBuffers buffers, int64_t numel, int num_threads);
double sum_of_squares(Isa isa, const void* grad, DType dtype, int64_t numel, int num_threads);
bool has_nonfinite(Isa isa, const void* grad, DType dtype, int64_t numel, int num_threads);
// Whether each 16-bit copy has the bits that adam_step would write beside its parameter.
bool is_copy(Isa isa, const float* exact, const void* copy, DType dtype, int64_t numel, int num_threads);
void cross_entropy(Isa isa, const CrossEntropy& rows, int64_t count, int num_threads);
void scale_rows(Isa isa, void* x, DType dtype, int64_t count, int64_t columns, const float* factors, int num_threads);
void encode_blocks(Isa isa, const void* x, DType dtype, const CodedBlocks& to, int64_t blocks, int num_threads);
void decode_blocks(Isa isa, const CodedBlocks& from, void* x, DType dtype, int64_t blocks, int num_threads);

}  // namespace lightning_zero
