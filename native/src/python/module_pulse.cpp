// Bindings of the signs of life that need no Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "base/immovable.h"
#include "python/python_gil.h"
#include "python/python_support.h"
#include "ranks/pulse.h"

namespace datastates {
namespace {

/// What Python holds: ends with `close`, or with the object; in a forked child it is nothing.
template <typename Pulse>
class PyPulse : public Immovable {
  public:
    explicit PyPulse(std::shared_ptr<Pulse> pulse) : pulse_(std::move(pulse)) {}
    ~PyPulse() { close(); }

    /// Throws once it is closed.
    [[nodiscard]] std::shared_ptr<Pulse> get() const {
        auto pulse = pulse_.get();
        if (!pulse) throw std::runtime_error("the pulse is closed");
        return pulse;
    }

    void close() {
        auto pulse = pulse_.take();
        const GilRelease release;  // its thread is joined
        pulse.reset();
    }

  private:
    ProcessBound<Pulse> pulse_;
};

using PyPulseServer = PyPulse<PulseServer>;
using PyPulseClient = PyPulse<PulseClient>;

}  // namespace

void bind_pulse(const py::module_& module) {
    py::class_<PyPulseServer>(module, "PulseServer", py::is_final())
        .def(
            py::init([](std::uint64_t token, std::size_t ranks) {
                return std::make_unique<PyPulseServer>(std::make_shared<PulseServer>(token, ranks));
            }),
            py::arg("token"), py::arg("ranks"))
        .def_property_readonly("port", [](const PyPulseServer& self) { return self.get()->port(); })
        .def("counts", [](const PyPulseServer& self) { return self.get()->counts(); })
        .def(
            "answer", [](const PyPulseServer& self, bool answers) { self.get()->answer(answers); },
            py::arg("answers"))
        .def("close", &PyPulseServer::close);
    py::class_<PyPulseClient>(module, "PulseClient", py::is_final())
        .def(py::init([](std::uint64_t token, std::uint32_t rank, double interval,
                         const std::vector<std::string>& hosts, std::uint16_t port) {
                 constexpr double kLongest = 86400;  // seconds
                 if (std::isnan(interval) || interval <= 0 || interval > kLongest) {
                     throw py::value_error("interval=" + std::to_string(interval) +
                                           " is not within a day");
                 }
                 return std::make_unique<PyPulseClient>(std::make_shared<PulseClient>(
                     token, rank, std::chrono::duration<double>(interval), hosts, port));
             }),
             py::arg("token"), py::arg("rank"), py::arg("interval"), py::arg("hosts"),
             py::arg("port"))
        .def_property_readonly("count",
                               [](const PyPulseClient& self) { return self.get()->count(); })
        .def(
            "send", [](const PyPulseClient& self, bool sends) { self.get()->send(sends); },
            py::arg("sends"))
        .def("close", &PyPulseClient::close);
}

}  // namespace datastates
