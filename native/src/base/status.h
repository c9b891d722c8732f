// What a step returns that may fail.

#pragma once

#include <concepts>
#include <utility>
#include <variant>

#include "base/fault.h"

namespace datastates {

/// A value, or the fault that there is in its place: what is needed here of C++23's std::expected.
template <typename T>
class [[nodiscard]] Result {
  public:
    Result()
        requires std::same_as<T, std::monostate>
    = default;
    explicit(false) Result(T value) : either_(std::in_place_index<0>, std::move(value)) {}
    explicit(false) Result(Fault fault) : either_(std::in_place_index<1>, std::move(fault)) {}

    [[nodiscard]] bool ok() const { return either_.index() == 0; }

    // Of one that is ok.
    T& operator*() & { return *std::get_if<0>(&either_); }
    const T& operator*() const& { return *std::get_if<0>(&either_); }
    T&& operator*() && { return std::move(**this); }
    T* operator->() { return std::get_if<0>(&either_); }

    // Of one that is not.
    [[nodiscard]] const Fault& fault() const& { return *std::get_if<1>(&either_); }
    [[nodiscard]] Fault&& fault() && { return std::move(*std::get_if<1>(&either_)); }

  private:
    std::variant<T, Fault> either_;
};

/// How a step ended that returns nothing.
using Status = Result<std::monostate>;

}  // namespace datastates
