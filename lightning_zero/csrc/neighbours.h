// Messages between processes of one host, without a network: the receiver copies from the sender's memory, once.
//
// Every process has a board, memory that its neighbours map too. A sender writes an offer onto the receiver's board (where
// the bytes are) and rings its bell; the receiver copies when it wants a message of this key, and rings back. Linux only.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lightning_zero {

// One message on its way. Its memory belongs to it until wait() has returned kDone, or cancel() has returned.
class Message {
public:
    enum Outcome { kUnderWay, kDone, kLate, kPeerGone, kFailed };

    int error() const { return error_; }  // errno of kFailed, once wait() has returned that

private:
    friend class Neighbours;
    bool over() const { return outcome_ != kUnderWay; }
    enum Kind { kSend, kReceive, kSum };

    bool concerns(int place) const { return std::find(peers_.begin(), peers_.end(), place) != peers_.end(); }

    Kind kind_ = kSend;
    bool moving_ = false;
    std::vector<int> peers_;  // of a sum: all terms in their order, this process' own among them
    int entry_ = -1;          // of a send: where it is offered
    uint64_t key_ = 0;
    char* memory_ = nullptr;
    int64_t bytes_ = 0;
    const float* own_ = nullptr;  // of a sum
    float scale_ = 1;
    Outcome outcome_ = kUnderWay;
    int error_ = 0;
};

class Neighbours {
public:
    // On each side, a process is known by its `place` among `places`. `board` is a file of board_bytes(places) bytes.
    static int64_t board_bytes(int places);
    // Copy from another process' memory: 0, or an errno.
    static int read(int pid, uint64_t address, void* to, int64_t bytes);
    Neighbours(int place, int places, int board);
    ~Neighbours();
    Neighbours(const Neighbours&) = delete;
    Neighbours& operator=(const Neighbours&) = delete;

    // Before any message to or from it. `process` is a pidfd, which is closed with this object.
    void add(int place, int pid, int process, int board);

    // Messages from one process to another are matched by key; a key comes again only after its message is over.
    std::shared_ptr<Message> send(int peer, uint64_t key, const void* memory, int64_t bytes);
    std::shared_ptr<Message> receive(int peer, uint64_t key, void* memory, int64_t bytes);
    // Receive from all places but the own one, and add on the way: memory = (sum of terms in the order of `places`) * scale.
    std::shared_ptr<Message> sum(const std::vector<int>& places, uint64_t key, const float* own, float* memory, int64_t count,
                                 float scale);
    bool over(const std::shared_ptr<Message>& message);
    Message::Outcome wait(const std::shared_ptr<Message>& message, double seconds);
    // Afterwards nobody touches its memory.
    void cancel(const std::shared_ptr<Message>& message);

private:
    struct Entry;
    struct Board;
    struct Peer {
        int pid = 0, process = -1;
        Board* board = nullptr;
        Entry* theirs = nullptr;  // on their board, for what is sent to them
        Entry* ours = nullptr;    // on this process' board, for what they send
    };
    Peer& at(int place) { return peers_[static_cast<size_t>(place)]; }
    const Peer& at(int place) const { return peers_[static_cast<size_t>(place)]; }
    using Lock = std::unique_lock<std::mutex>;

    std::shared_ptr<Message> post(Message message);
    void work();
    bool advance(Lock& lock);
    bool take(const Message& message, std::vector<Entry*>& taken);
    void move(Lock& lock, const std::shared_ptr<Message>& message, const std::vector<Entry*>& taken);
    int copy(const Message& message, const std::vector<Entry*>& taken) const;
    bool offer(Message& message);
    void end(Message& message, Message::Outcome outcome, int error = 0);
    void forget_ended();
    void look_for_the_dead();
    static void ring(Board& board);

    const int place_, process_;
    int64_t board_bytes_;
    Board* board_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Peer> peers_;
    std::vector<std::shared_ptr<Message>> messages_;
    bool closing_ = false;
    std::thread thread_;
};

}  // namespace lightning_zero
