#include "ranks/pulse.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kToken = 0x1234567890abcdef;
constexpr milliseconds kInterval(2);

PulseClient client(const PulseServer& server, std::uint32_t rank, std::uint64_t token = kToken,
                   const std::vector<std::string>& hosts = {"127.0.0.1"}) {
    return {token, rank, kInterval, hosts, server.port()};
}

void await(const std::function<bool()>& condition) {
    while (!condition()) std::this_thread::sleep_for(milliseconds(1));
}

void both_sides_hear_each_other() {
    const PulseServer server(kToken, 3);
    const PulseClient first = client(server, 1);
    const PulseClient second = client(server, 2);
    await([&] { return server.counts()[1] > 2 && server.counts()[2] > 2; });
    await([&] { return first.count() > 2 && second.count() > 2; });
    check_equal(server.counts()[0], 0U);
}

void a_rank_that_has_ended_is_not_heard_again() {
    const PulseServer server(kToken, 2);
    {
        const PulseClient first = client(server, 1);
        await([&] { return first.count() > 0; });
    }
    // What it sent is there before it ended, so one more look is enough.
    const PulseClient other = client(server, 0);
    await([&] { return other.count() > 1; });
    const std::uint32_t last = server.counts()[1];
    const std::uint32_t heard = other.count();
    await([&] { return other.count() > heard + 5; });
    check_equal(server.counts()[1], last);
}

void a_client_that_is_not_to_send_is_silent_until_it_may() {
    const PulseServer server(kToken, 2);
    PulseClient first = client(server, 1);
    await([&] { return first.count() > 0; });
    first.send(false);
    const PulseClient other = client(server, 0);
    await([&] { return other.count() > 1; });  // one datagram may have been on its way
    const std::uint32_t last = server.counts()[1];
    const std::uint32_t heard = other.count();
    await([&] { return other.count() > heard + 5; });
    check(server.counts()[1] <= last + 1);
    first.send(true);
    await([&] { return server.counts()[1] > last + 2; });
}

void a_server_that_is_not_to_answer_counts_all_the_same() {
    PulseServer server(kToken, 2);
    server.answer(false);
    const PulseClient first = client(server, 1);
    await([&] { return server.counts()[1] > 5; });
    check_equal(first.count(), 0U);
    server.answer(true);
    await([&] { return first.count() > 0; });
}

void strangers_are_not_counted() {
    const PulseServer server(kToken, 2);
    const PulseClient stranger = client(server, 1, kToken + 1);
    const PulseClient beyond = client(server, 2);
    const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(server.port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const std::array<char, 2000> noise{};
    for (const std::size_t size : {0U, 1U, 11U, 13U, 2000U}) {
        ::sendto(fd, noise.data(), size, 0, reinterpret_cast<const sockaddr*>(&address),
                 sizeof address);
    }
    const PulseClient known = client(server, 0);
    await([&] { return known.count() > 10; });
    check_equal(server.counts()[1], 0U);
    check_equal(stranger.count(), 0U);
    check_equal(beyond.count(), 0U);
    ::close(fd);
}

void of_several_hosts_one_is_enough() {
    const PulseServer server(kToken, 2);
    const PulseClient first = client(server, 1, kToken, {"127.0.0.2", "192.0.2.1", "127.0.0.1"});
    await([&] { return first.count() > 2; });
}

void a_name_is_refused() {
    const PulseServer server(kToken, 2);
    std::optional<std::string> refused;
    try {
        const PulseClient first = client(server, 1, kToken, {"localhost"});
    } catch (const std::invalid_argument& error) {
        refused = error.what();
    }
    check(refused.has_value());
}

void a_server_ends_before_its_clients() {
    auto server = std::make_unique<PulseServer>(kToken, 2);
    const PulseClient first = client(*server, 1);
    await([&] { return first.count() > 0; });
    server.reset();
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases(
        {{"both_sides_hear_each_other", both_sides_hear_each_other},
         {"a_rank_that_has_ended_is_not_heard_again", a_rank_that_has_ended_is_not_heard_again},
         {"a_client_that_is_not_to_send_is_silent_until_it_may",
          a_client_that_is_not_to_send_is_silent_until_it_may},
         {"a_server_that_is_not_to_answer_counts_all_the_same",
          a_server_that_is_not_to_answer_counts_all_the_same},
         {"strangers_are_not_counted", strangers_are_not_counted},
         {"of_several_hosts_one_is_enough", of_several_hosts_one_is_enough},
         {"a_name_is_refused", a_name_is_refused},
         {"a_server_ends_before_its_clients", a_server_ends_before_its_clients}});
}
