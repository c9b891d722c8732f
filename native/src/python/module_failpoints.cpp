// Bindings of the failpoints.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "files/failpoints.h"
#include "python/python_support.h"

namespace datastates {
namespace {

using Entry = std::tuple<std::string, std::optional<std::uint64_t>, std::string, double>;

Failpoint to_failpoint(const Entry& entry) {
    using Action = Failpoint::Action;
    const auto& [name, nth, action, argument] = entry;
    Failpoint point{.name = name, .nth = nth};
    if (action == "kill") {
        point.action = Action::kKill;
    } else if (action == "stop") {
        point.action = Action::kStop;
    } else if (action == "sleep") {
        point.action = Action::kSleep;
        point.time = std::chrono::duration<double>(argument);
    } else if (action == "error") {
        point.action = Action::kError;
        point.error = static_cast<int>(argument);
    } else {
        throw py::value_error("'" + action + "' is not an action of failpoints");
    }
    return point;
}

std::shared_ptr<Failpoints> make_failpoints(const std::vector<Entry>& entries,
                                            const std::string& log_path) {
    std::vector<Failpoint> points;
    points.reserve(entries.size());
    for (const Entry& entry : entries) points.push_back(to_failpoint(entry));
    return std::make_shared<Failpoints>(points, log_path);
}

int hit(Failpoints& self, const std::string& name) {
    return self.hit(name, [](std::chrono::duration<double> time) {
        wait_in_slices(time.count(), [](auto deadline) {
            std::this_thread::sleep_until(deadline);
            return false;
        });
    });
}

}  // namespace

void bind_failpoints(const py::module_& module) {
    py::class_<Failpoints, std::shared_ptr<Failpoints>>(module, "Failpoints", py::is_final())
        .def(py::init(&make_failpoints), py::arg("entries"), py::arg("log_path"))
        .def("hit", &hit, py::arg("name"));
}

}  // namespace datastates
