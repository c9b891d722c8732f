// Work without the GIL.

#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstddef>

#include "base/immovable.h"

namespace datastates {

/// Below this, giving up the GIL costs more than the work.
inline constexpr std::size_t kReleaseGilBytes = std::size_t{256} << 10U;

/// Gives up the GIL while it lives. For pybind11's class, the end of the interpreter is fatal:
/// Python before 3.14 unwinds the stack of a daemon thread that wants the GIL then, and that leaves
/// a destructor. Such a thread hangs here, as from 3.14 on: nothing that it holds may be let go
/// of without the GIL.
class GilRelease : public Immovable {
  public:
    GilRelease() : state_(PyEval_SaveThread()) {}
    ~GilRelease() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // the unwinding, which is no exception of C++'s
            while (true) pause();
        }
    }

  private:
    PyThreadState* state_;
};

}  // namespace datastates
