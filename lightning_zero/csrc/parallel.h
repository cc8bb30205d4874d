// A static split of a range over threads that live for one call.
//
// No pool: a call leaves nothing behind, so it is safe after a fork, from any thread, and next to any other runtime, and
// new threads inherit the caller's affinity. No OpenMP either: its workers, woken after an idle spell (a step follows a
// blocking collective), were measured to cost several times the whole step.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace lightning_zero {

// How a thread treats subnormals and rounding. Workers take the caller's, so that results do not depend on who computes.
class FloatingPointMode {
public:
#if defined(__SSE2__)
    FloatingPointMode() : mode_(_mm_getcsr()) {}
    void apply() const { _mm_setcsr(mode_); }

private:
    unsigned mode_;
#elif defined(__aarch64__)
    FloatingPointMode() { asm volatile("mrs %0, fpcr" : "=r"(mode_)); }
    void apply() const { asm volatile("msr fpcr, %0" : : "r"(mode_)); }

private:
    uint64_t mode_;
#else
    void apply() const {}
#endif
};

// Calls body(begin, end) for consecutive ranges that cover [0, count) and start at multiples of `align`.
// `grain` is the least that is worth a thread.
template <class Body>
void parallel_for(int64_t count, int num_threads, int64_t grain, int64_t align, const Body& body) {
    const int64_t useful = count / grain;
    const int64_t threads = num_threads < useful ? num_threads : useful;
    if (threads <= 1) return body(int64_t{0}, count);

    const int64_t chunks = (count + align - 1) / align;
    const auto bound = [&](int64_t t) { return t == threads ? count : chunks * t / threads * align; };
    const FloatingPointMode mode;
    std::vector<std::thread> workers;
    workers.reserve(static_cast<size_t>(threads - 1));
    int64_t started = 1;
    try {
        for (; started < threads; ++started) {
            workers.emplace_back([&body, &mode, begin = bound(started), end = bound(started + 1)] {
                mode.apply();
                body(begin, end);
            });
        }
    } catch (const std::system_error&) {
        // No more threads to be had: the caller does what is left.
    }
    body(int64_t{0}, bound(1));
    if (started < threads) body(bound(started), count);
    for (std::thread& worker : workers) worker.join();
}

}  // namespace lightning_zero
