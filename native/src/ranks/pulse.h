// Signs of life that need no Python.
//
// A call that holds the GIL for long (a compilation, a graph capture) keeps every Python thread
// from running, and the one that beats in the ranks' store with them. The process lives all the
// same, and these threads show it:
//
//  1. The coordinator's PulseServer waits for datagrams at a UDP port that the kernel chooses.
//  2. The PulseClient of every other rank sends one, of a token and its rank, once an interval.
//  3. The server counts it and sends it back, and the client counts what comes back.
//
// A count that goes up says that the other process runs, and that the network between the two
// carries datagrams. A lost datagram is not sent again: the next one is as good.

#pragma once

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/immovable.h"

namespace datastates {

/// Closes a descriptor.
class OwnedFd {
  public:
    explicit OwnedFd(int fd) : fd_(fd) {}
    OwnedFd(const OwnedFd&) = delete;
    OwnedFd& operator=(const OwnedFd&) = delete;
    OwnedFd(OwnedFd&& other) noexcept;
    OwnedFd& operator=(OwnedFd&&) = delete;
    ~OwnedFd();

    [[nodiscard]] int get() const { return fd_; }

  private:
    int fd_;
};

/// The coordinator's side. Any thread may call any method; none blocks.
class PulseServer : public Immovable {
  public:
    /// Knows the ranks from 1 to `ranks` - 1, if they know the `token`.
    /// Throws std::system_error where no socket can be had.
    PulseServer(std::uint64_t token, std::size_t ranks);
    ~PulseServer();

    [[nodiscard]] std::uint16_t port() const;

    /// How many datagrams of each rank have come.
    [[nodiscard]] std::vector<std::uint32_t> counts() const;

    /// Whether to send datagrams back. It does at first.
    void answer(bool answers) { answers_.store(answers, std::memory_order_relaxed); }

  private:
    void run();
    void receive();

    std::uint64_t token_;
    std::vector<std::atomic<std::uint32_t>> counts_;
    std::atomic<bool> answers_ = true;
    OwnedFd socket_;
    OwnedFd ending_;  // an eventfd: readable from the destructor on
    std::jthread thread_;
};

/// The side of every other rank. Any thread may call any method; none blocks.
class PulseClient : public Immovable {
  public:
    /// Sends to each of `hosts` (numeric addresses, of either family) at `port`, as it is not known
    /// which of them is the way to the server. Throws std::system_error where no socket can be had,
    /// and std::invalid_argument if a host is not a numeric address.
    PulseClient(std::uint64_t token, std::uint32_t rank, std::chrono::duration<double> interval,
                const std::vector<std::string>& hosts, std::uint16_t port);
    ~PulseClient();

    /// How many datagrams have come back.
    [[nodiscard]] std::uint32_t count() const { return count_.load(std::memory_order_relaxed); }

    /// Whether to send any. It does at first.
    void send(bool sends) { sends_.store(sends, std::memory_order_relaxed); }

  private:
    struct Target {
        sockaddr_storage address;
        socklen_t size;
        OwnedFd socket;
    };

    void run();
    bool wait_until(std::chrono::steady_clock::time_point due);
    void receive(int socket);

    std::uint64_t token_;
    std::uint32_t rank_;
    std::chrono::steady_clock::duration interval_;
    std::vector<Target> targets_;
    std::atomic<std::uint32_t> count_ = 0;
    std::atomic<bool> sends_ = true;
    OwnedFd ending_;  // an eventfd: readable from the destructor on
    std::jthread thread_;
};

}  // namespace datastates
