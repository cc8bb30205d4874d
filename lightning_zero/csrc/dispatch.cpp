// From one call to the kernels of an instruction set, over threads.
#include <atomic>

#include "kernels.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lightning_zero {
namespace {

constexpr int64_t kCacheLine = 64;  // elements; keeps the threads' ranges on separate cache lines
constexpr int64_t kAdamGrain = 1 << 17;  // starting a thread costs some ten microseconds, a step of this length eighty
constexpr int64_t kScanGrain = 1 << 18;  // reading one array is some ten times cheaper than a step
constexpr int64_t kSoftmaxGrain = 1 << 17;  // two exponentials for each element
constexpr int64_t kSumBlock = 1 << 15;   // fixed, so that the sum does not depend on the threads

// Streaming the copy pays when it would not have stayed in the cache for its next reader anyway.
constexpr int64_t kStreamFrom = 1 << 22;

int64_t rows_per_thread(int64_t grain, int64_t columns) { return columns < grain ? grain / (columns > 0 ? columns : 1) : 1; }

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows this one.
bool processor_has_f16c() {
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

bool processor_has(Isa isa) {
    switch (isa) {
#if defined(__x86_64__)
        case Isa::kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && processor_has_f16c();
        case Isa::kAvx512:
            return processor_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
        default: return true;  // the build has no table for what the architecture lacks
    }
}

const KernelTable* table(Isa isa) {
    switch (isa) {
        case Isa::kAvx512: return avx512_kernels();
        case Isa::kAvx2: return avx2_kernels();
        case Isa::kNeon: return neon_kernels();
        default: return portable_kernels();
    }
}

}  // namespace

bool isa_available(Isa isa) { return table(isa) != nullptr && processor_has(isa); }

void adam_step(Isa isa, const AdamFactors& factors, AdamBuffers buffers, int64_t numel, int num_threads) {
    const KernelTable* kernels = table(isa);
    buffers.stream_copy = numel >= kStreamFrom;
    parallel_for(numel, num_threads, kAdamGrain, kCacheLine,
                 [&](int64_t begin, int64_t end) { kernels->adam(factors, buffers, begin, end); });
}

double sum_of_squares(Isa isa, const void* grad, DType dtype, int64_t numel, int num_threads) {
    const KernelTable* kernels = table(isa);
    std::vector<double> blocks(static_cast<size_t>((numel + kSumBlock - 1) / kSumBlock));
    parallel_for(numel, num_threads, kScanGrain, kSumBlock, [&](int64_t begin, int64_t end) {
        for (int64_t start = begin; start < end; start += kSumBlock) {
            const int64_t stop = end - start < kSumBlock ? end : start + kSumBlock;
            blocks[static_cast<size_t>(start / kSumBlock)] = kernels->sum_of_squares(grad, dtype, start, stop);
        }
    });
    double total = 0;
    for (const double block : blocks) total += block;
    return total;
}

bool has_nonfinite(Isa isa, const void* grad, DType dtype, int64_t numel, int num_threads) {
    const KernelTable* kernels = table(isa);
    std::atomic<bool> found{false};
    parallel_for(numel, num_threads, kScanGrain, kCacheLine, [&](int64_t begin, int64_t end) {
        if (kernels->has_nonfinite(grad, dtype, begin, end)) found.store(true, std::memory_order_relaxed);
    });
    return found.load(std::memory_order_relaxed);
}

bool is_copy(Isa isa, const float* exact, const void* copy, DType dtype, int64_t numel, int num_threads) {
    const KernelTable* kernels = table(isa);
    std::atomic<bool> differs{false};
    parallel_for(numel, num_threads, kScanGrain, kCacheLine, [&](int64_t begin, int64_t end) {
        if (!kernels->is_copy(exact, copy, dtype, begin, end)) differs.store(true, std::memory_order_relaxed);
    });
    return !differs.load(std::memory_order_relaxed);
}

void cross_entropy(Isa isa, const CrossEntropy& rows, int64_t count, int num_threads) {
    const KernelTable* kernels = table(isa);
    parallel_for(count, num_threads, rows_per_thread(kSoftmaxGrain, rows.classes), 1,
                 [&](int64_t begin, int64_t end) { kernels->cross_entropy(rows, begin, end); });
}

void scale_rows(Isa isa, void* x, DType dtype, int64_t count, int64_t columns, const float* factors, int num_threads) {
    const KernelTable* kernels = table(isa);
    parallel_for(count, num_threads, rows_per_thread(kScanGrain, columns), 1,
                 [&](int64_t begin, int64_t end) { kernels->scale_rows(x, dtype, columns, factors, begin, end); });
}

void encode_blocks(Isa isa, const void* x, DType dtype, const CodedBlocks& to, int64_t blocks, int num_threads) {
    const KernelTable* kernels = table(isa);
    parallel_for(blocks, num_threads, kScanGrain / kCodedBlock, 1,
                 [&](int64_t begin, int64_t end) { kernels->encode(x, dtype, to, begin, end); });
}

void decode_blocks(Isa isa, const CodedBlocks& from, void* x, DType dtype, int64_t blocks, int num_threads) {
    const KernelTable* kernels = table(isa);
    parallel_for(blocks, num_threads, kScanGrain / kCodedBlock, 1,
                 [&](int64_t begin, int64_t end) { kernels->decode(from, x, dtype, begin, end); });
}

}  // namespace lightning_zero
