// The little that these tests need of a test framework.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
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

/// Runs one case, and says its name and how it ended; whether it passed.
template <void (*run)()>
bool passes() {
    std::string name = __PRETTY_FUNCTION__;  // "… [… run = …::the_name_of_the_case]"
    name = name.substr(name.rfind(':') + 1);
    name.pop_back();
    try {
        run();
        std::printf("ok    %s\n", name.c_str());
    } catch (const std::exception& error) {
        std::printf("FAIL  %s\n      %s\n", name.c_str(), error.what());
        return false;
    }
    std::fflush(stdout);
    return true;
}

/// Runs cases in their order, until one fails; what `main` returns.
template <void (*... cases)()>
int run_cases() {
    return (passes<cases>() && ...) ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace datastates::testing
