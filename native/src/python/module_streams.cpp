// Bindings of what callers send and fetch: pieces of streamed saves, ranges for streamed restores.

#include <pybind11/pybind11.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "python/python_arguments.h"
#include "python/python_gil.h"
#include "python/python_jobs.h"
#include "python/python_support.h"

namespace datastates {
namespace {

/// The next item; StopIteration after the last; RuntimeError in the words of a fault.
template <typename PyItem, typename Item>
std::unique_ptr<PyItem> next_of(const PyItems<Item>& self) {
    const auto next = required(self.next, "iterator");
    Result<std::shared_ptr<Item>> item = std::shared_ptr<Item>();
    wait_in_slices(std::numeric_limits<double>::infinity(), [&](auto deadline) {
        auto found = (*next)(deadline);
        const bool is_over = found.has_value();
        if (is_over) item = *std::move(found);
        return is_over;
    });
    auto taken = value_or_raise(std::move(item));
    if (!taken) throw py::stop_iteration();
    return std::make_unique<PyItem>(std::move(taken));
}

template <typename PyItem, typename Item>
void bind_items(const py::module_& module, const char* name) {
    py::class_<PyItems<Item>>(module, name, py::is_final())
        .def("__iter__", [](const py::object& self) { return self; })
        .def("__next__", &next_of<PyItem, Item>);
}

void fill(PyReadRequest& self, const py::object& data) {
    const PyBufferView view(data, PyBUF_SIMPLE);
    const auto nbytes = self.fetch.step.bytes.size();
    if (view.bytes().size() != nbytes) {
        throw py::value_error("data has " + std::to_string(view.bytes().size()) +
                              " bytes instead of " + std::to_string(nbytes));
    }
    if (!required(self.request, "request")) {
        throw std::runtime_error("this request was filled before");
    }
    auto request = self.request.take();
    const GilRelease release;
    request->fill(view.bytes());
    request.reset();
}

}  // namespace

void bind_streams(const py::module_& module) {
    py::class_<PySegment>(module, "Segment", py::is_final(), py::buffer_protocol())
        .def_property_readonly("nbytes", [](const PySegment& self) { return self.bytes.size(); })
        .def_buffer([](const PySegment& self) {
            if (!self.piece.here()) throw py::buffer_error("a forked child has no host cache");
            return py::buffer_info(reinterpret_cast<const unsigned char*>(self.bytes.data()),
                                   static_cast<py::ssize_t>(self.bytes.size()));
        });
    bind_items<PySegment, Piece>(module, "SegmentStream");

    py::class_<PyReadRequest>(module, "ReadRequest", py::is_final())
        .def_property_readonly("path",
                               [](const PyReadRequest& self) { return to_text(self.fetch.path); })
        .def_property_readonly(
            "offset", [](const PyReadRequest& self) { return self.fetch.step.bytes.begin; })
        .def_property_readonly(
            "nbytes", [](const PyReadRequest& self) { return self.fetch.step.bytes.size(); })
        .def("fill", &fill, py::arg("data"));
    bind_items<PyReadRequest, ReadRequest>(module, "ReadRequests");
}

}  // namespace datastates
