// Bindings of Transfer.

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "memory/transfer.h"
#include "python/python_arguments.h"
#include "python/python_support.h"

namespace datastates {
namespace {

int to_device(std::int64_t number) {
    if (number < kHost || number > std::numeric_limits<int>::max()) {
        throw py::value_error("device=" + std::to_string(number) + " is no device");
    }
    return static_cast<int>(number);
}

void add(Transfer& transfer, std::int64_t offset, std::int64_t nbytes, std::uint64_t address,
         Group group, int device) {
    transfer.add(to_size(offset, "offset"), to_size(nbytes, "nbytes"), to_address(address), group,
                 Access::kReadWrite, device);
}

void add_many(Transfer& transfer, const py::object& offsets, const py::object& sizes,
              const py::object& addresses, const py::object& groups, const py::object& devices) {
    std::optional<IntColumn> numbers;
    if (!devices.is_none()) numbers.emplace(devices, "devices");
    const std::array columns{IntColumn(offsets, "offsets"), IntColumn(sizes, "sizes"),
                             IntColumn(addresses, "addresses"), IntColumn(groups, "groups")};
    const std::size_t count = columns[0].size();
    for (const IntColumn& column : columns) {
        if (column.size() == count) continue;
        throw py::value_error(
            "columns differ in length: offsets has " + std::to_string(columns[0].size()) +
            ", sizes " + std::to_string(columns[1].size()) + ", addresses " +
            std::to_string(columns[2].size()) + ", groups " + std::to_string(columns[3].size()));
    }
    if (numbers && numbers->size() != count) {
        throw py::value_error("columns differ in length: offsets has " + std::to_string(count) +
                              ", devices " + std::to_string(numbers->size()));
    }
    Transfer added;  // so that a bad entry changes nothing
    added.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        added.add(to_size(columns[0][i], "offsets"), to_size(columns[1][i], "sizes"),
                  to_address(columns[2].address(i)), columns[3][i], Access::kReadWrite,
                  numbers ? to_device((*numbers)[i]) : kHost);
    }
    transfer.append(added);
}

void add_buffer(Transfer& transfer, std::int64_t offset, const py::object& data, Group group) {
    const PyBufferView view(data, PyBUF_SIMPLE);
    transfer.add(to_size(offset, "offset"), view.bytes().size(), view.bytes().data(), group,
                 view.read_only() ? Access::kReadOnly : Access::kReadWrite);
}

void add_strided(Transfer& transfer, std::int64_t offset, std::int64_t itemsize,
                 const py::object& sizes, const py::object& stream_strides, std::uint64_t address,
                 const py::object& memory_strides, Group group, int device) {
    const IntColumn size_column(sizes, "sizes");
    const IntColumn stream_column(stream_strides, "stream_strides");
    const IntColumn memory_column(memory_strides, "memory_strides");
    const std::size_t rank = size_column.size();
    if (stream_column.size() != rank || memory_column.size() != rank) {
        throw py::value_error("sizes has " + std::to_string(rank) + " dimensions, stream_strides " +
                              std::to_string(stream_column.size()) + " and memory_strides " +
                              std::to_string(memory_column.size()));
    }
    std::vector<Axis> axes;
    axes.reserve(rank);
    for (std::size_t i = 0; i < rank; ++i) {
        axes.push_back({.size = to_size(size_column[i], "sizes"),
                        .stream_stride = to_size(stream_column[i], "stream_strides"),
                        .memory_stride = memory_column[i]});
    }
    transfer.add_strided(to_size(offset, "offset"), to_size(itemsize, "itemsize"), axes,
                         to_address(address), group, device);
}

}  // namespace

void bind_transfer(const py::module_& module) {
    py::class_<Transfer>(module, "Transfer", py::is_final())
        .def(py::init<>())
        .def("add", &add, py::arg("offset"), py::arg("nbytes"), py::arg("address"),
             py::arg("group") = 0, py::arg("device") = kHost)
        .def("add_many", &add_many, py::arg("offsets"), py::arg("sizes"), py::arg("addresses"),
             py::arg("groups"), py::arg("devices") = py::none())
        .def("add_buffer", &add_buffer, py::arg("offset"), py::arg("data"), py::arg("group") = 0)
        .def("add_strided", &add_strided, py::arg("offset"), py::arg("itemsize"), py::arg("sizes"),
             py::arg("stream_strides"), py::arg("address"), py::arg("memory_strides"),
             py::arg("group") = 0, py::arg("device") = kHost)
        .def_property_readonly("nbytes", &Transfer::nbytes);
}

}  // namespace datastates
