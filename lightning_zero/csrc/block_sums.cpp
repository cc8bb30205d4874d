#include "block_sums.h"

#include <cstring>

namespace lightning_zero {

namespace {

// Four lanes, to keep a multiplier busy. Each step is one to one in the word and in what was before, so that a change
// within one word is always seen, and any other with all but certainty.
uint64_t sum_of(const char* block) {
    constexpr int kLanes = 4;
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
    const auto mix = [](uint64_t sum, uint64_t word) {
        sum = (sum ^ word) * kOdd;
        return sum << 29 | sum >> 35;
    };
    uint64_t lanes[kLanes] = {1, 2, 3, 4};
    for (int64_t i = 0; i < BlockSums::kBlock; i += 8 * kLanes) {
        uint64_t words[kLanes];
        std::memcpy(words, block + i, sizeof words);
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
    }
    uint64_t sum = 0;
    for (uint64_t lane : lanes) sum = mix(sum, lane);
    return sum;
}

std::vector<uint64_t> sums_of(const char* blocks, int64_t count) {
    std::vector<uint64_t> sums(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] = sum_of(blocks + i * BlockSums::kBlock);
    return sums;
}

}  // namespace

void BlockSums::extend(int64_t first, int64_t count) {
    static const char zeros[kBlock] = {};
    const std::lock_guard<std::mutex> lock(mutex_);
    if (static_cast<int64_t>(sums_.size()) < first + count) sums_.resize(static_cast<size_t>(first + count), sum_of(zeros));
}

void BlockSums::begin_write() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++under_way_;
}

void BlockSums::end_write(const char* blocks, int64_t first, int64_t count) {
    const std::vector<uint64_t> now = sums_of(blocks, count);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (count) std::memcpy(sums_.data() + first, now.data(), now.size() * sizeof now[0]);
    --under_way_;
    ++writes_;
}

int64_t BlockSums::changed(const char* blocks, int64_t first, int64_t count) {
    const std::vector<uint64_t> now = sums_of(blocks, count);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t i = 0; i < count; ++i) {
        if (sums_[static_cast<size_t>(first + i)] != now[static_cast<size_t>(i)]) return first + i;
    }
    return -1;
}

int64_t BlockSums::quiet_since() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return under_way_ ? 0 : writes_;
}

}  // namespace lightning_zero
