// Bindings of events of devices.

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "device.h"
#include "fault.h"
#include "python_jobs.h"
#include "python_support.h"

namespace datastates {

Fences to_fences(const PyFences& events) {
    Fences fences;
    for (const PyDeviceEvent* const event : events) {
        if (event == nullptr) throw py::type_error("an event is None");
        fences.push_back(required(event->event, "event"));
    }
    return fences;
}

void bind_devices(const py::module_& module) {
    py::class_<PyDeviceEvent>(module, "DeviceEvent", py::is_final())
        .def_readonly("device", &PyDeviceEvent::device)
        .def(
            "hold",
            [](const PyDeviceEvent& self, StreamHandle stream) {
                const auto event = required(self.event, "event");
                if (const auto fault = event->device()->hold(stream, *event)) {
                    throw std::runtime_error(describe(*fault));
                }
            },
            py::arg("stream"))
        .def(
            "wait",
            [](const PyDeviceEvent& self, double timeout) {
                const auto event = required(self.event, "event");
                MaybeFault fault;
                const bool came = wait_in_slices(timeout, [&](auto deadline) {
                    bool done = false;
                    fault = event->wait([&] { return Clock::now() >= deadline; }, done);
                    return done || fault;
                });
                if (fault) throw std::runtime_error(describe(*fault));
                return came;
            },
            py::arg("timeout"));
}

}  // namespace datastates
