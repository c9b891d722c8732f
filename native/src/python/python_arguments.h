// Views of Python's objects: buffers, and columns of integers.

#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/immovable.h"

namespace datastates {

/// The bytes of an object with the buffer protocol, exported as long as the view lives.
class PyBufferView : public Immovable {
  public:
    /// Raises what Python raises, for an object that is not contiguous, say.
    PyBufferView(const pybind11::handle& object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw pybind11::error_already_set();
        }
    }
    ~PyBufferView() { PyBuffer_Release(&view_); }

    [[nodiscard]] std::span<std::byte> bytes() const {
        return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }
    [[nodiscard]] bool read_only() const { return view_.readonly != 0; }

  private:
    Py_buffer view_{};
};

/// A path (str, bytes or os.PathLike) as the system wants it.
inline std::string to_path(const pybind11::handle& path) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), static_cast<void*>(&encoded)) == 0) {
        throw pybind11::error_already_set();
    }
    return pybind11::reinterpret_steal<pybind11::bytes>(encoded);
}

inline std::vector<std::string> to_paths(const pybind11::sequence& sequence) {
    std::vector<std::string> paths;
    for (const auto& path : sequence) paths.push_back(to_path(path));
    return paths;
}

/// Text of the system's (a path in it, say) as Python shows it.
inline pybind11::str to_text(const std::string& text) {
    auto decoded = pybind11::reinterpret_steal<pybind11::str>(
        PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
    if (!decoded) throw pybind11::error_already_set();
    return decoded;
}

/// A sequence of ints, read without a Python call per entry (lists and tuples: no copy either).
class IntColumn {
  public:
    IntColumn(const pybind11::handle& sequence, const char* name)
        : name_(name),
          fast_(pybind11::reinterpret_steal<pybind11::object>(
              PySequence_Fast(sequence.ptr(), "a sequence of ints is needed"))) {
        if (!fast_) throw pybind11::error_already_set();
        items_ = {PySequence_Fast_ITEMS(fast_.ptr()),
                  static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()))};
    }

    [[nodiscard]] std::size_t size() const { return items_.size(); }

    std::int64_t operator[](std::size_t i) const {
        const long long value = PyLong_AsLongLong(items_[i]);
        if (value == -1 && PyErr_Occurred() != nullptr) refuse(i);
        return value;
    }

    /// An entry that may use all 64 bits.
    [[nodiscard]] std::uint64_t address(std::size_t i) const {
        const long long value = PyLong_AsLongLong(items_[i]);
        if (value >= 0) return static_cast<std::uint64_t>(value);
        if (PyErr_Occurred() == nullptr) refuse(i);
        PyErr_Clear();
        const unsigned long long wide = PyLong_AsUnsignedLongLong(items_[i]);
        if (PyErr_Occurred() != nullptr) refuse(i);
        return wide;
    }

  private:
    [[noreturn]] void refuse(std::size_t i) const {
        PyErr_Clear();
        throw pybind11::value_error(std::string(name_) + "[" + std::to_string(i) +
                                    "] is not an int in range");
    }

    const char* name_;
    pybind11::object fast_;
    std::span<PyObject*> items_;
};

}  // namespace datastates
