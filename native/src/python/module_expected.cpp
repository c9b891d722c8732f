// Bindings of ExpectedBytes.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "memory/expected_bytes.h"
#include "memory/transfer.h"
#include "python/python_arguments.h"
#include "python/python_support.h"

namespace datastates {
namespace {

/// Tensor i of the columns has the number `numbers[i]`.
std::vector<TensorMemory> to_memory(const py::sequence& numbers, const py::sequence& addresses,
                                    const py::sequence& sizes) {
    const IntColumn tensors(numbers, "tensors");
    const IntColumn starts(addresses, "addresses");
    const IntColumn lengths(sizes, "sizes");
    if (starts.size() != lengths.size() || tensors.size() != lengths.size()) {
        throw py::value_error(
            "tensors, addresses and sizes have " + std::to_string(tensors.size()) + ", " +
            std::to_string(starts.size()) + " and " + std::to_string(lengths.size()) + " entries");
    }
    std::vector<TensorMemory> memory;
    memory.reserve(starts.size());
    for (std::size_t i = 0; i < starts.size(); ++i) {
        const std::uint64_t nbytes = to_size(lengths[i], "sizes");
        if (nbytes == 0) continue;
        const std::byte* const start = to_address(starts.address(i));
        if (start == nullptr) throw py::value_error("a tensor has the null address");
        memory.push_back(
            {.tensor = to_size(tensors[i], "tensors"), .address = start, .nbytes = nbytes});
    }
    return memory;
}

Transfer device_words(ExpectedBytes& self, const py::sequence& tensors,
                      const py::sequence& addresses, const py::sequence& sizes, std::uint64_t seed,
                      std::uint64_t base, std::uint64_t offset, int device) {
    const auto memory = to_memory(tensors, addresses, sizes);
    std::byte* const out = to_address(base);
    Transfer words;
    for (const DeviceCopy& copy : self.add_device_words(memory, seed, out + offset)) {
        // A transfer can also write, so it takes memory that is not const.
        words.add(static_cast<std::uint64_t>(copy.to - out), copy.nbytes,
                  const_cast<std::byte*>(copy.from),  // NOLINT(*-const-cast)
                  kStableGroup, Access::kReadOnly, device);
    }
    return words;
}

}  // namespace

void bind_expected(const py::module_& module) {
    py::class_<ExpectedBytes, std::shared_ptr<ExpectedBytes>>(module, "ExpectedBytes",
                                                              py::is_final())
        .def(py::init<>())
        .def_readonly_static("MOST_WORD_BYTES", &ExpectedBytes::kMostWordBytes)
        .def(
            "add_words",
            [](ExpectedBytes& self, const py::sequence& tensors, const py::sequence& addresses,
               const py::sequence& sizes,
               std::uint64_t seed) { self.add_words(to_memory(tensors, addresses, sizes), seed); },
            py::arg("tensors"), py::arg("addresses"), py::arg("sizes"), py::arg("seed"))
        .def("add_device_words", &device_words, py::arg("tensors"), py::arg("addresses"),
             py::arg("sizes"), py::arg("seed"), py::arg("base"), py::arg("offset"),
             py::arg("device"))
        .def(
            "add_whole",
            [](ExpectedBytes& self, const py::sequence& tensors, const py::sequence& addresses,
               const py::sequence& sizes, const py::sequence& copies) {
                const auto memory = to_memory(tensors, addresses, sizes);
                const IntColumn at(copies, "copies");
                if (at.size() != memory.size()) {
                    throw py::value_error("copies has " + std::to_string(at.size()) +
                                          " entries for " + std::to_string(memory.size()) +
                                          " tensors that are not empty");
                }
                for (std::size_t i = 0; i < memory.size(); ++i) {
                    self.add_whole(memory[i], to_address(at.address(i)));
                }
            },
            py::arg("tensors"), py::arg("addresses"), py::arg("sizes"), py::arg("copies"));
}

}  // namespace datastates
