#include "neighbours.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

#ifdef __linux__
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

namespace lightning_zero {

#ifdef __linux__

namespace {

constexpr int kEntries = 64;  // offers of one process to another at a time; what is more waits on the sender's side
constexpr std::chrono::duration<double> kLookAround(0.1);  // for processes that have ended meanwhile

constexpr int64_t kSumBlock = 16 * 1024;  // floats: three blocks of them fit into the second cache

enum State : uint32_t { kFree, kOffered, kTaken, kRead, kRefused };

void add_term(float* total, const float* term, int64_t count, bool first, float scale) {
    if (first) {
        if (total != term) std::memcpy(total, term, static_cast<size_t>(count) * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < count; ++i) total[i] = (total[i] + term[i]) * scale;
}

}  // namespace

struct Neighbours::Entry {
    std::atomic<uint32_t> state;
    uint64_t key, address;
    int64_t bytes;
};

struct Neighbours::Board {
    std::atomic<uint32_t> bell;      // counts what has changed on this board or is to be done by its owner
    std::atomic<uint32_t> sleeping;  // whether the owner is to be woken
    std::atomic<uint32_t> closed;    // the owner answers nobody any more
    alignas(64) Entry entries[];

    Entry* of(int place) { return entries + place * kEntries; }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a board is shared between processes");

int Neighbours::read(int pid, uint64_t address, void* to, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
        const iovec here = {static_cast<char*>(to) + done, static_cast<size_t>(bytes - done)};
        const iovec there = {reinterpret_cast<void*>(address + static_cast<uint64_t>(done)), here.iov_len};
        const ssize_t now = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return now < 0 ? errno : EFAULT;
        done += now;
    }
    return 0;
}

int64_t Neighbours::board_bytes(int places) {
    return static_cast<int64_t>(sizeof(Board)) + static_cast<int64_t>(sizeof(Entry)) * kEntries * places;
}

Neighbours::Neighbours(int place, int places, int board)
    : place_(place), process_(getpid()), board_bytes_(board_bytes(places)), peers_(static_cast<size_t>(places)) {
    void* memory = mmap(nullptr, static_cast<size_t>(board_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, board, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category());
    board_ = static_cast<Board*>(memory);
    thread_ = std::thread([this] { work(); });
}

Neighbours::~Neighbours() {
    if (process_ != getpid()) {
        thread_.detach();  // a fork has this object, but neither its thread nor anything to say
    } else {
        {
            const Lock lock(mutex_);
            closing_ = true;
        }
        ring(*board_);
        thread_.join();
        board_->closed = 1;
    }
    for (Peer& peer : peers_) {
        if (!peer.board) continue;
        if (process_ == getpid()) ring(*peer.board);
        munmap(peer.board, static_cast<size_t>(board_bytes_));
        close(peer.process);
    }
    munmap(board_, static_cast<size_t>(board_bytes_));
}

void Neighbours::add(int place, int pid, int process, int board) {
    void* memory = mmap(nullptr, static_cast<size_t>(board_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, board, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category());
    const int own = fcntl(process, F_DUPFD_CLOEXEC, 0);
    if (own < 0) {
        munmap(memory, static_cast<size_t>(board_bytes_));
        throw std::system_error(errno, std::generic_category());
    }
    const Lock lock(mutex_);
    Peer& peer = at(place);
    peer.board = static_cast<Board*>(memory);
    peer.theirs = peer.board->of(place_);
    peer.ours = board_->of(place);
    peer.pid = pid;
    peer.process = own;
}

std::shared_ptr<Message> Neighbours::send(int peer, uint64_t key, const void* memory, int64_t bytes) {
    Message message;
    message.peers_ = {peer};
    message.key_ = key;
    message.memory_ = static_cast<char*>(const_cast<void*>(memory));
    message.bytes_ = bytes;
    return post(std::move(message));
}

std::shared_ptr<Message> Neighbours::receive(int peer, uint64_t key, void* memory, int64_t bytes) {
    Message message;
    message.kind_ = Message::kReceive;
    message.peers_ = {peer};
    message.key_ = key;
    message.memory_ = static_cast<char*>(memory);
    message.bytes_ = bytes;
    return post(std::move(message));
}

std::shared_ptr<Message> Neighbours::sum(const std::vector<int>& places, uint64_t key, const float* own, float* memory,
                                         int64_t count, float scale) {
    Message message;
    message.kind_ = Message::kSum;
    message.peers_ = places;
    message.key_ = key;
    message.memory_ = reinterpret_cast<char*>(memory);
    message.bytes_ = count * static_cast<int64_t>(sizeof(float));
    message.own_ = own;
    message.scale_ = scale;
    return post(std::move(message));
}

std::shared_ptr<Message> Neighbours::post(Message posted) {
    auto message = std::make_shared<Message>(std::move(posted));
    bool offered = false;
    {
        const Lock lock(mutex_);
        messages_.push_back(message);
        if (message->kind_ == Message::kSend) offered = offer(*message);
    }
    if (!offered) ring(*board_);
    return message;
}

// Onto the receiver's board, if there is room.
bool Neighbours::offer(Message& message) {
    Peer& peer = at(message.peers_[0]);
    for (int i = 0; i < kEntries; ++i) {
        Entry& entry = peer.theirs[i];
        if (entry.state.load() != kFree) continue;
        entry.key = message.key_;
        entry.address = reinterpret_cast<uint64_t>(message.memory_);
        entry.bytes = message.bytes_;
        entry.state = kOffered;
        message.entry_ = i;
        ring(*peer.board);
        return true;
    }
    return false;
}

// Take the next step of some message; whether there was one. Copying is done without the lock.
bool Neighbours::advance(Lock& lock) {
    bool ended = false;
    std::vector<Entry*> taken;
    for (size_t index = 0; index < messages_.size(); ++index) {
        const std::shared_ptr<Message> message = messages_[index];
        if (message->over() || message->moving_) continue;
        if (message->kind_ != Message::kSend) {
            if (!take(*message, taken)) continue;
            move(lock, message, taken);
            return true;
        }
        if (message->entry_ < 0) {
            offer(*message);
            continue;
        }
        Entry& entry = at(message->peers_[0]).theirs[message->entry_];
        const uint32_t state = entry.state.load();
        if (state != kRead && state != kRefused) continue;
        entry.state = kFree;
        end(*message, state == kRead ? Message::kDone : Message::kFailed, state == kRead ? 0 : EREMOTEIO);
        ended = true;
    }
    if (ended) forget_ended();
    return ended;
}

// The offers that a message waits for, in the order of its peers, if all are there; null for the own place.
bool Neighbours::take(const Message& message, std::vector<Entry*>& taken) {
    taken.clear();
    for (const int place : message.peers_) {
        Entry* found = nullptr;
        for (int i = 0; place != place_ && !found && i < kEntries; ++i) {
            Entry& entry = at(place).ours[i];
            if (entry.state.load() == kOffered && entry.key == message.key_) found = &entry;
        }
        if (place != place_ && !found) return false;
        taken.push_back(found);
    }
    for (size_t i = 0; i < taken.size(); ++i) {
        uint32_t offered = kOffered;
        if (!taken[i] || taken[i]->state.compare_exchange_strong(offered, kTaken)) continue;
        while (i-- > 0) {  // that one was withdrawn meanwhile
            if (taken[i]) taken[i]->state = kOffered;
        }
        return false;
    }
    return true;
}

void Neighbours::move(Lock& lock, const std::shared_ptr<Message>& message, const std::vector<Entry*>& taken) {
    message->moving_ = true;
    lock.unlock();
    const int error = copy(*message, taken);
    for (size_t i = 0; i < taken.size(); ++i) {
        if (!taken[i]) continue;
        taken[i]->state = error ? kRefused : kRead;
        ring(*at(message->peers_[i]).board);
    }
    lock.lock();
    message->moving_ = false;
    end(*message, error == ESRCH ? Message::kPeerGone : error ? Message::kFailed : Message::kDone, error);
    forget_ended();
}

int Neighbours::copy(const Message& message, const std::vector<Entry*>& taken) const {
    for (const Entry* entry : taken) {
        if (entry && entry->bytes != message.bytes_) return EMSGSIZE;
    }
    if (message.kind_ == Message::kReceive) {
        return read(at(message.peers_[0]).pid, taken[0]->address, message.memory_, message.bytes_);
    }
    // A block at a time: what has come is added while it is in the cache.
    alignas(64) float come[kSumBlock];
    float* const total = reinterpret_cast<float*>(message.memory_);
    const int64_t count = message.bytes_ / static_cast<int64_t>(sizeof(float));
    for (int64_t start = 0; start < count; start += kSumBlock) {
        const int64_t size = std::min(kSumBlock, count - start);
        for (size_t term = 0; term < taken.size(); ++term) {
            const float* from = message.own_ + start;
            if (taken[term]) {
                const uint64_t address = taken[term]->address + static_cast<uint64_t>(start) * sizeof(float);
                float* const to = term ? come : total + start;
                const int error = read(at(message.peers_[term]).pid, address, to, size * static_cast<int64_t>(sizeof(float)));
                if (error) return error;
                from = to;
            }
            const bool last = term + 1 == taken.size();
            add_term(total + start, from, size, term == 0, last ? message.scale_ : 1.0f);
        }
    }
    return 0;
}

void Neighbours::end(Message& message, Message::Outcome outcome, int error) {
    message.outcome_ = outcome;
    message.error_ = error;
    changed_.notify_all();
}

void Neighbours::forget_ended() {
    const auto ended = [](const std::shared_ptr<Message>& message) { return message->over(); };
    messages_.erase(std::remove_if(messages_.begin(), messages_.end(), ended), messages_.end());
}

bool Neighbours::over(const std::shared_ptr<Message>& message) {
    const Lock lock(mutex_);
    return message->over();
}

Message::Outcome Neighbours::wait(const std::shared_ptr<Message>& message, double seconds) {
    const auto start = std::chrono::steady_clock::now();
    Lock lock(mutex_);
    while (!message->over()) {
        if (advance(lock)) continue;
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        if (waited.count() >= seconds) return Message::kLate;
        const double pause = std::min(seconds - waited.count(), kLookAround.count());
        if (changed_.wait_for(lock, std::chrono::duration<double>(pause)) == std::cv_status::timeout) look_for_the_dead();
    }
    return message->outcome_;
}

void Neighbours::cancel(const std::shared_ptr<Message>& message) {
    if (process_ != getpid()) return;
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return !message->moving_; });
    if (message->over()) return;
    if (message->entry_ >= 0) {
        std::atomic<uint32_t>& state = at(message->peers_[0]).theirs[message->entry_].state;
        for (uint32_t seen = kOffered; !state.compare_exchange_strong(seen, kFree); seen = kOffered) {
            if (seen == kTaken) {
                // It is being read, which does not take long unless the reader has ended in it; or is offered again.
                if (changed_.wait_for(lock, kLookAround) == std::cv_status::timeout) look_for_the_dead();
            } else {
                state = kFree;
            }
            if (message->over()) return;
            if (seen != kTaken) break;
        }
    }
    end(*message, Message::kFailed, ECANCELED);
    forget_ended();
}

void Neighbours::look_for_the_dead() {
    for (int place = 0; place < static_cast<int>(peers_.size()); ++place) {
        const Peer& peer = at(place);
        if (!peer.board) continue;
        pollfd ended = {peer.process, POLLIN, 0};
        if (!peer.board->closed.load() && poll(&ended, 1, 0) <= 0) continue;
        for (const std::shared_ptr<Message>& message : messages_) {
            if (!message->moving_ && message->concerns(place)) end(*message, Message::kPeerGone);
        }
    }
    forget_ended();
}

void Neighbours::work() {
    Lock lock(mutex_);
    while (!closing_) {
        const uint32_t seen = board_->bell.load();
        if (advance(lock)) continue;
        lock.unlock();
        board_->sleeping = 1;
        // Not if the bell has rung since it was looked at. Whoever waits for a message looks whether its peer is alive.
        syscall(SYS_futex, &board_->bell, FUTEX_WAIT, seen, nullptr, nullptr, 0);
        board_->sleeping = 0;
        lock.lock();
    }
    for (const std::shared_ptr<Message>& message : messages_) end(*message, Message::kFailed, ECANCELED);
}

void Neighbours::ring(Board& board) {
    board.bell.fetch_add(1);
    if (board.sleeping.load()) syscall(SYS_futex, &board.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

struct Neighbours::Entry {};
struct Neighbours::Board {};

int64_t Neighbours::board_bytes(int) { return 0; }
int Neighbours::read(int, uint64_t, void*, int64_t) { return ENOSYS; }
Neighbours::Neighbours(int place, int, int) : place_(place), process_(0) { throw std::system_error(ENOSYS, std::generic_category()); }
Neighbours::~Neighbours() {}
void Neighbours::add(int, int, int, int) {}
std::shared_ptr<Message> Neighbours::send(int, uint64_t, const void*, int64_t) { return nullptr; }
std::shared_ptr<Message> Neighbours::sum(const std::vector<int>&, uint64_t, const float*, float*, int64_t, float) { return nullptr; }
std::shared_ptr<Message> Neighbours::receive(int, uint64_t, void*, int64_t) { return nullptr; }
bool Neighbours::over(const std::shared_ptr<Message>&) { return true; }
Message::Outcome Neighbours::wait(const std::shared_ptr<Message>&, double) { return Message::kFailed; }
void Neighbours::cancel(const std::shared_ptr<Message>&) {}

#endif

}  // namespace lightning_zero
