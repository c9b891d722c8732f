// The little that these tests need of a test framework.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace datastates::testing {

/// Fails the case if `holds` is false.
inline void check(bool holds, std::string_view what = "",
                  std::source_location where = std::source_location::current()) {
    if (holds) return;
    throw std::runtime_error(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
                             ": check failed" + (what.empty() ? "" : ": ") + std::string(what));
}

template <typename A, typename B>
void check_equal(const A& found, const B& expected,
                 std::source_location where = std::source_location::current()) {
    if (found == expected) return;
    check(false, "found " + std::to_string(found) + ", expected " + std::to_string(expected),
          where);
}

/// Fails the case unless `call` throws an `Error` whose text contains `words`.
template <typename Error, typename Call>
void check_throws(std::string_view words, Call&& call,
                  std::source_location where = std::source_location::current()) {
    try {
        call();
    } catch (const Error& error) {
        check(std::string_view(error.what()).find(words) != std::string_view::npos, error.what(),
              where);
        return;
    }
    check(false, "nothing was thrown", where);
}

struct Case {
    const char* name;
    void (*run)();
};

/// Runs all cases; what `main` returns.
inline int run_cases(std::initializer_list<Case> cases) {
    for (const Case& test : cases) {
        try {
            test.run();
            std::printf("ok    %s\n", test.name);
        } catch (const std::exception& error) {
            std::printf("FAIL  %s\n      %s\n", test.name, error.what());
            return EXIT_FAILURE;
        }
        std::fflush(stdout);
    }
    return EXIT_SUCCESS;
}

}  // namespace datastates::testing
