// Reads and writes of files on threads of their own, while the caller computes. No Python, no torch, no global state.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "block_sums.h"

namespace lightning_zero {

// One range of a file on its way. The buffer belongs to the transfer until wait() returns.
class Transfer {
public:
    struct Result {
        int error;      // errno of the first piece that failed, or 0
        int64_t bytes;  // that went through, which is less than asked for where a file ends early
        int64_t changed;  // offset of a block that is not as it was written, or -1
    };

    // Returns when the transfer is over, again and again the same.
    Result wait();
    bool done();

private:
    friend class FileQueue;
    std::mutex mutex_;
    std::condition_variable over_;
    int64_t pieces_left_ = 0;
    Result result_{0, 0, -1};
};

// `threads` workers that carry out transfers, cut into pieces of at most kPiece bytes, in the order of their coming.
//
// With `align` above 1 the file was opened for direct access: its offsets, lengths and memory are then multiples of
// that. What is not goes through an aligned buffer of the worker: a read of the blocks around it, and for a write the
// blocks at its ends are read first. So two writes under way may not touch the same block. With `sums`, for which `align` is a
// multiple of their blocks, what is read is compared with what was written.
class FileQueue {
public:
    static constexpr int64_t kPiece = int64_t{1} << 20;

    explicit FileQueue(int threads);
    ~FileQueue();  // after the transfers that were asked for
    FileQueue(const FileQueue&) = delete;
    FileQueue& operator=(const FileQueue&) = delete;

    // How long there has been something to do since the start.
    double busy_seconds();

    std::shared_ptr<Transfer> submit(int file, bool write, void* buffer, int64_t bytes, int64_t offset, int64_t align,
                                     std::shared_ptr<BlockSums> sums);

private:
    struct Piece {
        std::shared_ptr<Transfer> transfer;
        int file;
        bool write;
        char* buffer;
        int64_t bytes, offset, align;
        std::shared_ptr<BlockSums> sums;
    };
    class Bounce;

    void work();
    static Transfer::Result carry_out(const Piece& piece, Bounce& bounce);

    std::mutex mutex_;
    std::condition_variable wanted_;
    std::deque<Piece> pieces_;
    int64_t under_way_ = 0;  // pieces that are not through, waiting ones among them
    using Clock = std::chrono::steady_clock;
    Clock::time_point busy_since_;
    Clock::duration busy_{0};
    bool closing_ = false;
    int process_;
    std::vector<std::thread> threads_;
};

}  // namespace lightning_zero
