#include "file_io.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include <unistd.h>

namespace lightning_zero {

namespace {

// Until everything is through, the file ends, or something fails.
Transfer::Result move(int file, bool write, char* buffer, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        const auto size = static_cast<size_t>(bytes - done);
        const ssize_t now = write ? pwrite(file, buffer + done, size, offset + done)
                                  : pread(file, buffer + done, size, offset + done);
        if (now < 0 && errno == EINTR) continue;
        if (now < 0) return {errno, done, -1};
        if (now == 0) break;
        done += now;
    }
    return {0, done, -1};
}

// The same for whole blocks, with their checksums if there are any.
Transfer::Result move_blocks(int file, bool write, char* buffer, int64_t bytes, int64_t offset, BlockSums* sums) {
    if (!sums) return move(file, write, buffer, bytes, offset);
    const int64_t first = offset / BlockSums::kBlock;
    if (write) {
        sums->begin_write();
        const Transfer::Result put = move(file, true, buffer, bytes, offset);
        sums->end_write(buffer, first, put.bytes / BlockSums::kBlock);
        return put;
    }
    for (;;) {
        const int64_t quiet = sums->quiet_since();
        const Transfer::Result got = move(file, false, buffer, bytes, offset);
        const int64_t changed = sums->changed(buffer, first, got.bytes / BlockSums::kBlock);
        if (changed < 0) return got;
        if (quiet && quiet == sums->quiet_since()) return {EIO, 0, changed * BlockSums::kBlock};
    }
}

int64_t down(int64_t value, int64_t align) { return value / align * align; }
int64_t up(int64_t value, int64_t align) { return down(value + align - 1, align); }

}  // namespace

Transfer::Result Transfer::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait(lock, [this] { return pieces_left_ == 0; });
    return result_;
}

bool Transfer::done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pieces_left_ == 0;
}

// Aligned memory for one piece and the blocks at its ends, made at its first use.
class FileQueue::Bounce {
public:
    ~Bounce() { std::free(memory_); }
    char* get(int64_t bytes, int64_t align) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = 0;
            if (posix_memalign(&memory_, static_cast<size_t>(align), static_cast<size_t>(bytes))) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<char*>(memory_);
    }

private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

FileQueue::FileQueue(int threads) : process_(getpid()) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

FileQueue::~FileQueue() {
    if (process_ != getpid()) {
        // A fork has this object but not its threads.
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

double FileQueue::busy_seconds() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Clock::duration now = under_way_ ? Clock::now() - busy_since_ : Clock::duration{0};
    return std::chrono::duration<double>(busy_ + now).count();
}

std::shared_ptr<Transfer> FileQueue::submit(int file, bool write, void* buffer, int64_t bytes, int64_t offset,
                                            int64_t align, std::shared_ptr<BlockSums> sums) {
    auto transfer = std::make_shared<Transfer>();
    char* const start = static_cast<char*>(buffer);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (under_way_ == 0) busy_since_ = Clock::now();
        // Cut where the file's blocks end, so that no two pieces share one.
        for (int64_t done = 0; done < bytes;) {
            const int64_t stop = down(offset + done + kPiece, align) - offset;
            const int64_t size = (stop < bytes ? stop : bytes) - done;
            pieces_.push_back({transfer, file, write, start + done, size, offset + done, align, sums});
            ++transfer->pieces_left_;
            ++under_way_;
            done += size;
        }
    }
    wanted_.notify_all();
    return transfer;
}

void FileQueue::work() {
    Bounce bounce;
    for (;;) {
        Piece piece;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wanted_.wait(lock, [this] { return closing_ || !pieces_.empty(); });
            if (pieces_.empty()) return;
            piece = std::move(pieces_.front());
            pieces_.pop_front();
        }
        Transfer::Result now{ENOMEM, 0, -1};
        try {
            now = carry_out(piece, bounce);
        } catch (const std::bad_alloc&) {
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (--under_way_ == 0) busy_ += Clock::now() - busy_since_;
        }
        Transfer& transfer = *piece.transfer;
        const std::lock_guard<std::mutex> lock(transfer.mutex_);
        transfer.result_.bytes += now.bytes;
        if (!transfer.result_.error) {
            transfer.result_.error = now.error;
            transfer.result_.changed = now.changed;
        }
        if (--transfer.pieces_left_ == 0) transfer.over_.notify_all();
    }
}

Transfer::Result FileQueue::carry_out(const Piece& piece, Bounce& bounce) {
    const int64_t align = piece.align, stop = piece.offset + piece.bytes;
    const bool aligned = piece.offset % align == 0 && piece.bytes % align == 0 &&
                         reinterpret_cast<uintptr_t>(piece.buffer) % static_cast<uintptr_t>(align) == 0;
    BlockSums* const sums = piece.sums.get();
    if (align <= 1 || aligned) return move_blocks(piece.file, piece.write, piece.buffer, piece.bytes, piece.offset, sums);

    const int64_t first = down(piece.offset, align), last = up(stop, align);
    char* const blocks = bounce.get(up(kPiece, align) + 2 * align, align);
    char* const own = blocks + (piece.offset - first);
    const auto clip = [&](int64_t bytes) {
        const int64_t through = bytes - (piece.offset - first);
        return through < 0 ? 0 : through < piece.bytes ? through : piece.bytes;
    };
    if (!piece.write) {
        const Transfer::Result got = move_blocks(piece.file, false, blocks, last - first, first, sums);
        std::memcpy(piece.buffer, own, static_cast<size_t>(clip(got.bytes)));
        return {got.error, clip(got.bytes), got.changed};
    }
    // What a block has beside the range stays as it is; a block that the file does not have yet holds zeros.
    const auto keep = [&](int64_t block) {
        std::memset(blocks + (block - first), 0, static_cast<size_t>(align));
        return move_blocks(piece.file, false, blocks + (block - first), align, block, sums);
    };
    if (first < piece.offset) {
        const Transfer::Result kept = keep(first);
        if (kept.error) return {kept.error, 0, kept.changed};
    }
    if (stop < last && !(first < piece.offset && last - first == align)) {
        const Transfer::Result kept = keep(last - align);
        if (kept.error) return {kept.error, 0, kept.changed};
    }
    std::memcpy(own, piece.buffer, static_cast<size_t>(piece.bytes));
    const Transfer::Result put = move_blocks(piece.file, true, blocks, last - first, first, sums);
    return {put.error, clip(put.bytes), -1};
}

}  // namespace lightning_zero
