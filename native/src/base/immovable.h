// A base class for what is neither copied nor moved.

#pragma once

namespace datastates {

/// An object of a derived class stays where it was made: others may keep its address.
class Immovable {
  public:
    Immovable(const Immovable&) = delete;
    Immovable& operator=(const Immovable&) = delete;
    Immovable(Immovable&&) = delete;
    Immovable& operator=(Immovable&&) = delete;

  protected:
    Immovable() = default;
    ~Immovable() = default;
};

}  // namespace datastates
