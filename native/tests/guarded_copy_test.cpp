#include "memory/guarded_copy.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "base/immovable.h"
#include "check.h"
#include "memory/sample.h"
#include "support.h"

namespace datastates::testing {
namespace {

constexpr std::size_t kPage = 4096;

/// Pages of which some can be taken away.
class Pages : public Immovable {
  public:
    explicit Pages(std::size_t count) : size_(count * kPage) {
        void* const memory =
            mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(memory != MAP_FAILED);
        data_ = static_cast<std::byte*>(memory);
        std::fill_n(data_, size_, std::byte{7});
    }
    ~Pages() { munmap(data_, size_); }

    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return size_; }
    void take_away(std::size_t page) const { check(munmap(data_ + page * kPage, kPage) == 0); }
    void close(std::size_t page) const {
        check(mprotect(data_ + page * kPage, kPage, PROT_NONE) == 0);
    }

  private:
    std::size_t size_;
    std::byte* data_ = nullptr;
};

void many_pieces_are_copied() {
    const Bytes from = random_bytes(1 << 20, 1);
    Bytes to(from.size());
    std::vector<DeviceCopy> pieces;
    for (std::size_t at = 0; at < from.size();) {  // thousands, of odd sizes
        const std::size_t nbytes = std::min<std::size_t>(1 + at % 509, from.size() - at);
        pieces.push_back({.to = to.data() + at, .from = from.data() + at, .nbytes = nbytes});
        at += nbytes;
    }
    check(pieces.size() > 3000);
    check_equal(copy_guarded(pieces), 0);
    check(to == from);
    check_equal(copy_guarded({}), 0);
}

void memory_that_is_gone_is_an_error() {
    const Pages pages(64);
    Bytes to(pages.size());
    const std::array whole{
        DeviceCopy{.to = to.data(), .from = pages.data(), .nbytes = pages.size()}};
    check_equal(copy_guarded(whole), 0);
    check(std::ranges::all_of(to, [](std::byte byte) { return byte == std::byte{7}; }));
    pages.take_away(40);
    check_equal(copy_guarded(whole), EFAULT);
    const std::array before{
        DeviceCopy{.to = to.data(), .from = pages.data(), .nbytes = 40 * kPage}};
    check_equal(copy_guarded(before), 0);
}

void memory_that_may_not_be_read_is_an_error() {
    const Pages pages(2);
    pages.close(1);
    Bytes to(pages.size());
    const std::array whole{
        DeviceCopy{.to = to.data(), .from = pages.data(), .nbytes = pages.size()}};
    check_equal(copy_guarded(whole), EFAULT);
}

void samples_of_what_is_gone_are_nothing() {
    const Pages pages(3);
    using View = std::span<const std::byte>;
    const std::array regions{View(pages.data(), kPage), View(pages.data() + kPage, kPage),
                             View(pages.data() + kPage, 5), View(pages.data() + 2 * kPage, 9)};
    const auto before = sample_words(regions, 3);
    check(sample_words(regions, 3, true) == before);
    pages.take_away(1);
    const auto after = sample_words(regions, 3, true);
    check_equal(after[0], before[0]);
    check_equal(after[1], 0U);
    check_equal(after[2], 0U);
    check_equal(after[3], before[3]);
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases<many_pieces_are_copied, memory_that_is_gone_is_an_error,
                     memory_that_may_not_be_read_is_an_error,
                     samples_of_what_is_gone_are_nothing>();
}
