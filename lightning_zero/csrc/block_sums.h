// Checksums of a file's blocks, in memory: that a block has changed on the disk is seen when it is read.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace lightning_zero {

class BlockSums {
public:
    static constexpr int64_t kBlock = 4096;

    // Blocks from `first` on read as zeros.
    void extend(int64_t first, int64_t count);

    // Called around a write of blocks; `blocks` are what they hold now, if `count` of them came to the file.
    void begin_write();
    void end_write(const char* blocks, int64_t first, int64_t count);

    // The first of `count` blocks that is not as it was written, or -1.
    int64_t changed(const char* blocks, int64_t first, int64_t count);

    // Writes so far; 0 while one is under way. A block that two ranges share may be read while one of them is written:
    // what differs counts if nobody wrote meanwhile, that is if this number was the same before and after, and not 0.
    int64_t quiet_since();

private:
    std::mutex mutex_;
    std::vector<uint64_t> sums_;
    int64_t writes_ = 1, under_way_ = 0;
};

}  // namespace lightning_zero
