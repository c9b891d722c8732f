#include "pickle_scan.h"

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "check.h"
#include "support.h"

namespace datastates::testing {
namespace {

/// A pickle of protocol 4 around `body`. (A string literal ends at its first NUL: `zero` is one.)
std::string pickle(const std::string& body) {
    return "\x80\x04" + body + ".";
}

std::string zero() {
    return {'\0'};
}

std::string text(std::string_view words) {
    return "\x8c" + std::string(1, static_cast<char>(words.size())) + std::string(words);
}

std::string name(std::string_view module, std::string_view attribute) {
    return text(module) + text(attribute) + "\x93";
}

std::string number(std::uint64_t value, unsigned bytes) {
    std::string result;
    for (unsigned i = 0; i < bytes; ++i) result += static_cast<char>(value >> (8 * i));
    return result;
}

std::string repeated(const std::string& part, unsigned times) {
    std::string result;
    for (unsigned i = 0; i < times; ++i) result += part;
    return result;
}

std::optional<std::string> scan(const std::string& bytes) {
    return scan_pickle(std::as_bytes(std::span(bytes)));
}

void check_passes(const std::string& body,
                  std::source_location where = std::source_location::current()) {
    check(!scan(pickle(body)), scan(pickle(body)).value_or(""), where);
}

void check_refused(const std::string& bytes, std::string_view words,
                   std::source_location where = std::source_location::current()) {
    const auto reason = scan(bytes);
    check(reason.has_value(), "it was not refused", where);
    check(reason->find(words) != std::string::npos, *reason, where);
}

std::string a_class() {
    return name("a", "C");
}

void what_picklers_write_passes() {
    check_passes("N");
    check_passes("\x88");
    check_passes("K\x01");
    check_passes("J\xff\xff\xff\xff");
    check_passes("\x8a" + number(8, 1) + number(1ULL << 62U, 8));
    check_passes("\x8a" + number(20, 1) + std::string(20, 'x'));
    check_passes("G" + number(0, 8));
    check_passes("X" + number(3, 4) + "abc");
    check_passes("B" + number(3, 4) + "abc");
    check_passes("\x96" + number(3, 8) + "abc");
    check_passes("\x95" + number(2, 8) + "N");
    check_passes("]\x94(K\x01K\x02" + std::string("e"));
    check_passes("}\x94(" + text("a") + "K\x01" + text("b") + "K\x02u");
    check_passes("\x8f\x94(" + text("a") + "\x90");
    check_passes("(" + text("a") + "\x91");
    check_passes("cmodule\nname\n");
    check_passes(a_class() + ")\x81}(" + text("x") + "K\x01ub");  // an instance, its state
    check_passes(a_class() + ")\x81(NNNNN" + "tb");               // __setstate__
    check_passes(name("torch", "Size") + "K\x01K\x02\x86\x85R");  // a call with integers
    check_passes(name("collections", "OrderedDict") + ")R" + text("k") + "Ns");
    check_passes("]q" + zero() + "h" + zero().substr(1) + zero() + "\x86");  // twice the same list
    // A dict whose key is an instance that holds a text and a size.
    check_passes("}" + a_class() + ")\x81}(" + text("fqn") + text("w") + text("offset") +
                 name("torch", "Size") + "K\x01\x85\x85Rub" + "K\x05s");
}

void what_is_cut_short_is_refused() {
    const std::string whole =
        pickle(a_class() + "\x94)\x81}(" + text("x") + "X" + number(2, 4) + "abub");
    check(!scan(whole), "the whole passes");
    for (std::size_t size = 0; size < whole.size(); ++size) {
        check(scan(whole.substr(0, size)).has_value(), std::to_string(size));
    }
    check_refused(whole + "N", "behind STOP");
}

void lengths_beyond_the_data_are_refused() {
    constexpr auto kHuge = std::numeric_limits<std::uint64_t>::max();
    for (const std::string op : {"\x8d", "\x8e", "\x96"}) {
        check_refused(pickle(op + number(kHuge, 8)), "beyond its end");
        check_refused(pickle(op + number(1ULL << 40U, 8) + "abc"), "beyond its end");
    }
    for (const std::string op : {"X", "B"}) {
        check_refused(pickle(op + number(0xFFFFFFFF, 4)), "beyond its end");
    }
    check_refused(pickle("\x95" + number(kHuge, 8) + "N"), "frame");
    check_refused(pickle("\x95" + number(3, 8) + "N"), "frame");
    check_refused(pickle("\x8b" + number(0x7FFFFFFF, 4)), "opcode");  // LONG4
}

void the_memo_grows_one_by_one() {
    check_passes("Nq" + zero());
    check_refused(pickle("Nq\x01"), "gaps");
    check_refused(pickle("Nr" + number(0x7FFFFFFF, 4)), "gaps");
    check_refused(pickle("h" + zero()), "not there");
    check_refused(pickle("j" + number(0xFFFFFFFF, 4)), "not there");
    check_refused(pickle("\x94"), "not there");
}

void opcodes_that_metadata_never_has_are_refused() {
    const std::string_view never =
        "0"
        "1"
        "2"
        "D"
        "F"
        "I"
        "L"
        "P"
        "Q"
        "S"
        "U"
        "V"
        "T"
        "d"
        "g"
        "i"
        "l"
        "o"
        "p"
        "\x82"
        "\x83"
        "\x84"
        "\x8b"
        "\x92"
        "\x97"
        "\x98"
        "\x80"
        "\xff"
        "\x01";
    for (const char op : never) {
        check_refused(pickle("N(NN" + std::string(1, op) + "1\n1\n"), "opcode");
    }
}

void attributes_are_set_on_new_instances_only() {
    const std::string state = "}(" + text("x") + "K\x01u";
    check_refused(pickle(a_class() + state + "b"), "did not just make");  // on a class
    check_refused(pickle(a_class() + "N" + state + "\x86" + "b"), "did not just make");
    check_refused(pickle(a_class() + text("a") + "\x85R" + state + "b"), "did not just make");
    check_refused(pickle(a_class() + ")R" + state + "b"), "no instance");
    check_refused(pickle(a_class() + ")\x81N" + state + "\x86" + "b"), "no dict");  // slots
    check_refused(pickle(a_class() + ")\x81Nb"), "no dict");
    check_refused(pickle(a_class() + ")\x81" + state + "b" + state + "b"), "second time");
    check_refused(pickle("]" + a_class() + ")\x81\x94" + "ah" + zero() + state + "b"),
                  "did not just make");  // from the memo
    check_refused(pickle(state + "q" + zero() + a_class() + ")\x81h" + zero() + "b\x86"),
                  "no dict");
}

void only_names_are_called_and_with_little() {
    check_refused(pickle(text("a") + ")R"), "made itself");
    check_refused(pickle(a_class() + ")\x81)R"), "made itself");
    check_refused(pickle(a_class() + "NN\x86R"), "arguments");
    check_refused(pickle(a_class() + "]\x85R"), "arguments");
    check_refused(pickle(a_class() + "N\x85R"), "arguments");
    check_refused(pickle(a_class() + "]R"), "arguments");
    check_refused(pickle(a_class() + "(" + repeated("K\x01", 65) + "t\x85R"), "arguments");
    check_passes(a_class() + "(" + repeated("K\x01", 64) + "t\x85R");
    check_refused(pickle(a_class() + "N\x85\x81"), "with arguments");
    check_refused(pickle(text("a") + ")\x81"), "no class");
    check_refused(pickle("N" + text("a") + "\x93"), "no text");
}

void containers_are_filled_where_they_are_made() {
    check_refused(pickle("]\x94" + std::string("]h") + zero() + "Nae"), "did not just make");
    check_refused(pickle("]\x94h" + zero() + "a"), "did not just make");
    check_refused(pickle("}Na"), "no list");
    check_refused(pickle("]NNs"), "no dict");
    check_refused(pickle(a_class() + ")\x81NNs"), "no dict");
    check_refused(pickle("](N\x90"), "no set");
    check_refused(pickle("}(Nu"), "without a value");
    check_refused(pickle("(e"), "not there");
    check_refused(pickle("N(\x85"), "not there");  // below the mark
    check_refused(pickle("u"), "no mark");
    check_refused(pickle("NN"), "behind");
    check_refused(pickle("(N"), "behind");
    check_refused(pickle(""), "behind");
}

void deep_nesting_is_refused() {
    check_passes(repeated("]", kMaxPickleDepth) + repeated("a", kMaxPickleDepth - 1));
    check_refused(pickle(repeated("]", 200) + repeated("a", 199)), "deeper");
    check_refused(pickle("N" + repeated("\x85", 200)), "deeper");
    check_refused(pickle("N" + repeated("(", 0) + repeated("\x85", 10'000'000)), "deeper");
    check_refused(pickle(repeated("(", 200) + "N" + repeated("t", 200)), "deeper");
    check_refused(pickle(repeated("}K\x01", 200) + "N" + repeated("s", 200)), "deeper");
    // Grown behind the back of a tuple that holds it: the list would have to be filled from the
    // memo.
    check_refused(pickle("]\x94\x85\x94h" + zero() + "h\x01" + "a\x86"), "did not just make");
}

void keys_are_small() {
    check_refused(pickle("}]Ns"), "a key");
    check_refused(pickle("}N\x85Ns"), "a key");
    check_refused(pickle("}\x8a" + number(9, 1) + std::string(9, 'x') + "Ns"), "a key");
    check_refused(pickle("}(" + repeated("K\x01", 300) + "tNs"), "a key");
    check_refused(pickle("}(\x91Ns"), "a key");
    check_refused(pickle("\x8f(]\x90"), "a key");
    check_refused(pickle("(]\x91"), "a key");
    check_passes("}" + text("a") + "K\x01\x86Ns");
    // A tuple that holds twice a tuple that holds twice ...: hashing it would take for ever.
    std::string doubled = "K\x01\x94";
    for (unsigned i = 0; i < 60; ++i) {
        doubled += "h" + number(i, 1) + "\x86\x94";
    }
    check_passes(doubled);
    check_refused(pickle("}h" + zero()), "not there");
    check_refused(pickle("}" + doubled + "Ns"), "a key");
}

/// The number for which hash((first, number)) is `wanted`, by going through CPython's tuple hash
/// backwards; nothing if an integer's hash cannot be that.
std::optional<std::uint64_t> colliding(std::uint64_t first, std::uint64_t wanted) {
    constexpr std::uint64_t kPrime1 = 11400714785074694791U;
    constexpr std::uint64_t kPrime2 = 14029467366897019727U;
    constexpr std::uint64_t kPrime5 = 2870177450012600261U;
    const auto inverse = [](std::uint64_t odd) {
        std::uint64_t result = odd;
        for (int i = 0; i < 6; ++i) result *= 2 - (odd * result);
        return result;
    };
    std::uint64_t before = kPrime5 + (first * kPrime2);
    before = std::rotl(before, 31) * kPrime1;
    std::uint64_t after = wanted - (2 ^ (kPrime5 ^ 3527539U));
    after = std::rotr(after * inverse(kPrime1), 31);
    const std::uint64_t lane = (after - before) * inverse(kPrime2);
    if (lane >= (std::uint64_t{1} << 61U) - 1) return std::nullopt;
    return lane;
}

void colliding_tuples_are_refused() {
    std::string tuples;
    std::string others;
    for (std::uint64_t first = 0; first < 1000; ++first) {
        const auto second = colliding(first, 12345);
        if (!second) continue;
        const std::string begin = "M" + number(first, 2) + "\x8a" + number(8, 1);
        tuples += begin + number(*second, 8) + "\x86";
        others += begin + number(*second % 1000, 8) + "\x86";
    }
    check_refused(pickle("](" + tuples + "e"), "collide");
    check_passes("](" + others + "e");
    check_passes("](" + others + others + others + "e");
}

void random_bytes_never_crash_it() {
    Random random(11);
    const std::string ops =
        std::string(
            "().BCGJKMNRX]abcehjqrstu}\x81\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x8f\x90\x91"
            "\x93\x94\x95\x96\n\x01\x02") +
        zero();
    for (int i = 0; i < 50'000; ++i) {
        std::string body;
        const std::uint64_t size = random_below(random, 40);
        for (std::uint64_t k = 0; k < size; ++k) {
            body += random_below(random, 8) == 0 ? static_cast<char>(random_below(random, 256))
                                                 : ops[random_below(random, ops.size())];
        }
        (void)scan(pickle(body));
        (void)scan(body);
    }
}

}  // namespace
}  // namespace datastates::testing

int main() {
    using namespace datastates::testing;
    return run_cases(
        {{"what_picklers_write_passes", what_picklers_write_passes},
         {"what_is_cut_short_is_refused", what_is_cut_short_is_refused},
         {"lengths_beyond_the_data_are_refused", lengths_beyond_the_data_are_refused},
         {"the_memo_grows_one_by_one", the_memo_grows_one_by_one},
         {"opcodes_that_metadata_never_has_are_refused",
          opcodes_that_metadata_never_has_are_refused},
         {"attributes_are_set_on_new_instances_only", attributes_are_set_on_new_instances_only},
         {"only_names_are_called_and_with_little", only_names_are_called_and_with_little},
         {"containers_are_filled_where_they_are_made", containers_are_filled_where_they_are_made},
         {"deep_nesting_is_refused", deep_nesting_is_refused},
         {"keys_are_small", keys_are_small},
         {"colliding_tuples_are_refused", colliding_tuples_are_refused},
         {"random_bytes_never_crash_it", random_bytes_never_crash_it}});
}
