// Bindings of events of devices.

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "base/fault.h"
#include "device/device.h"
#include "python/python_jobs.h"
#include "python/python_support.h"

namespace datastates {

Fences to_fences(const PyFences& events) {
    Fences fences;
    for (const PyDeviceEvent* const event : events) {
        if (event == nullptr) throw py::type_error("an event is None");
        fences.push_back(required(event->event, "event"));
    }
    return fences;
}

namespace {

/// Remembers a fault of the driver until the device has nothing to do any more.
bool wait_idle(PyDeviceEvent& self, double timeout) {
    const auto event = required(self.event, "event");
    std::optional<Fault> fault;
    bool idle = false;
    const auto remember = [&] {
        if (fault && !self.fault) self.fault = std::move(fault);
    };
    try {
        wait_in_slices(timeout, [&](auto deadline) {
            auto [status, finished] = event->wait_idle([&] { return Clock::now() >= deadline; });
            if (!status.ok() && !fault) fault = std::move(status).fault();
            return idle = finished;
        });
    } catch (...) {  // a signal's handler raised
        remember();
        throw;
    }
    remember();
    if (idle && self.fault) throw std::runtime_error(describe(*self.fault));
    return idle;
}

}  // namespace

void bind_devices(const py::module_& module) {
    py::class_<PyDeviceEvent>(module, "DeviceEvent", py::is_final())
        .def_readonly("device", &PyDeviceEvent::device)
        .def(
            "hold",
            [](const PyDeviceEvent& self, StreamHandle stream) {
                const auto event = required(self.event, "event");
                value_or_raise([&] {
                    const GilRelease release;
                    return event->device()->hold(stream, *event);
                }());
            },
            py::arg("stream"))
        .def("wait", &wait_idle, py::arg("timeout"));
}

}  // namespace datastates
