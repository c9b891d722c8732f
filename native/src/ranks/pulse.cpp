#include "ranks/pulse.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace datastates {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kReceiveBufferBytes = 4 << 20;  // thousands of ranks may send at once

struct Datagram {
    std::uint64_t token;
    std::uint32_t rank;
};
constexpr std::size_t kDatagramBytes = sizeof(Datagram::token) + sizeof(Datagram::rank);
using Bytes = std::array<std::byte, kDatagramBytes + 1>;  // one more, to see what is too long

void encode(const Datagram& datagram, Bytes& bytes) {
    std::memcpy(bytes.data(), &datagram.token, sizeof datagram.token);
    std::memcpy(bytes.data() + sizeof datagram.token, &datagram.rank, sizeof datagram.rank);
}

std::optional<Datagram> decode(const Bytes& bytes, ssize_t received) {
    if (received != static_cast<ssize_t>(kDatagramBytes)) return std::nullopt;
    Datagram datagram{};
    std::memcpy(&datagram.token, bytes.data(), sizeof datagram.token);
    std::memcpy(&datagram.rank, bytes.data() + sizeof datagram.token, sizeof datagram.rank);
    return datagram;
}

int required(int fd, const char* what) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
    return fd;
}

OwnedFd datagram_socket(int family) {
    return OwnedFd(
        required(::socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket"));
}

OwnedFd event() {
    return OwnedFd(required(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd"));
}

void raise(const OwnedFd& event) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof one);
}

/// A socket that hears IPv4 and IPv6, or IPv4 alone where the kernel has no other.
OwnedFd listening_socket() {
    sockaddr_in6 both{};
    both.sin6_family = AF_INET6;
    both.sin6_addr = in6addr_any;
    const int off = 0;
    OwnedFd wide(::socket(AF_INET6, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (wide.get() >= 0 &&
        ::setsockopt(wide.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
        ::bind(wide.get(), reinterpret_cast<const sockaddr*>(&both), sizeof both) == 0) {
        return wide;
    }
    sockaddr_in four{};
    four.sin_family = AF_INET;
    four.sin_addr.s_addr = INADDR_ANY;
    OwnedFd narrow = datagram_socket(AF_INET);
    required(::bind(narrow.get(), reinterpret_cast<const sockaddr*>(&four), sizeof four), "bind");
    return narrow;
}

}  // namespace

OwnedFd::OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

OwnedFd::~OwnedFd() {
    if (fd_ >= 0) ::close(fd_);
}

PulseServer::PulseServer(std::uint64_t token, std::size_t ranks)
    : token_(token), counts_(ranks), socket_(listening_socket()), ending_(event()) {
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &kReceiveBufferBytes,
                 sizeof kReceiveBufferBytes);  // as much of it as the system grants
    thread_ = start_thread("ds-pulse", [this] { run(); });
}

PulseServer::~PulseServer() {
    raise(ending_);
}

std::uint16_t PulseServer::port() const {
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    required(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&bound), &size),
             "getsockname");
    // The port lies at the same place in both families.
    return ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
}

std::vector<std::uint32_t> PulseServer::counts() const {
    std::vector<std::uint32_t> found;
    found.reserve(counts_.size());
    for (const auto& count : counts_) found.push_back(count.load(std::memory_order_relaxed));
    return found;
}

void PulseServer::run() {
    std::array<pollfd, 2> watched{
        {{socket_.get(), POLLIN, 0}, {ending_.get(), POLLIN, 0}},
    };
    while (true) {
        const int ready = ::poll(watched.data(), watched.size(), -1);
        if (ready < 0 && errno != EINTR) return;
        if (watched[1].revents != 0) return;
        if (watched[0].revents != 0) receive();
    }
}

void PulseServer::receive() {
    Bytes bytes{};
    sockaddr_storage sender{};
    while (true) {
        socklen_t size = sizeof sender;
        const ssize_t received = ::recvfrom(socket_.get(), bytes.data(), bytes.size(), 0,
                                            reinterpret_cast<sockaddr*>(&sender), &size);
        if (received < 0) return;  // empty, or an answer that did not arrive
        const auto datagram = decode(bytes, received);
        if (!datagram || datagram->token != token_ || datagram->rank >= counts_.size()) continue;
        counts_[datagram->rank].fetch_add(1, std::memory_order_relaxed);
        if (answers_.load(std::memory_order_relaxed)) {
            ::sendto(socket_.get(), bytes.data(), kDatagramBytes, 0,
                     reinterpret_cast<const sockaddr*>(&sender), size);
        }
    }
}

PulseClient::PulseClient(std::uint64_t token, std::uint32_t rank,
                         std::chrono::duration<double> interval,
                         const std::vector<std::string>& hosts, std::uint16_t port)
    : token_(token),
      rank_(rank),
      interval_(std::chrono::duration_cast<Clock::duration>(interval)),
      ending_(event()) {
    for (const std::string& host : hosts) {
        addrinfo hints{};
        hints.ai_socktype = SOCK_DGRAM;
        hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
        addrinfo* found = nullptr;
        if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
            throw std::invalid_argument("'" + host + "' is not a numeric address");
        }
        sockaddr_storage address{};
        const socklen_t size = found->ai_addrlen;
        std::memcpy(&address, found->ai_addr, size);
        ::freeaddrinfo(found);
        targets_.push_back({address, size, datagram_socket(address.ss_family)});
    }
    thread_ = start_thread("ds-pulse", [this] { run(); });
}

PulseClient::~PulseClient() {
    raise(ending_);
}

void PulseClient::run() {
    Bytes bytes{};
    encode({token_, rank_}, bytes);
    bool goes_on = true;
    while (goes_on) {
        for (const Target& target : targets_) {
            if (!sends_.load(std::memory_order_relaxed)) break;
            ::sendto(target.socket.get(), bytes.data(), kDatagramBytes, 0,
                     reinterpret_cast<const sockaddr*>(&target.address), target.size);
        }
        goes_on = wait_until(Clock::now() + interval_);
    }
}

/// Receives until then; false if it is to end.
bool PulseClient::wait_until(Clock::time_point due) {
    std::vector<pollfd> watched{{ending_.get(), POLLIN, 0}};
    for (const Target& target : targets_) watched.push_back({target.socket.get(), POLLIN, 0});
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Clock::now()).count();
        if (left <= 0) return true;
        const int ready = ::poll(watched.data(), watched.size(), static_cast<int>(left));
        if (ready < 0 && errno != EINTR) return false;
        if (watched[0].revents != 0) return false;
        for (std::size_t i = 1; ready > 0 && i < watched.size(); ++i) {
            if (watched[i].revents != 0) receive(watched[i].fd);
        }
    }
}

void PulseClient::receive(int socket) {
    Bytes bytes{};
    while (true) {
        const ssize_t received = ::recv(socket, bytes.data(), bytes.size(), 0);
        if (received < 0) return;  // empty, or the server cannot be reached
        const auto datagram = decode(bytes, received);
        if (datagram && datagram->token == token_ && datagram->rank == rank_) {
            count_.fetch_add(1, std::memory_order_relaxed);
        }
    }
}

}  // namespace datastates
