// The Python module. Its contract is dcp_datastates/_native.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/fault.h"
#include "base/sizes.h"
#include "files/crc32c.h"
#include "memory/sample.h"
#include "python/python_arguments.h"
#include "python/python_gil.h"
#include "python/python_support.h"

namespace datastates {
namespace {

std::uint32_t checksum(const py::buffer& data, std::uint32_t crc) {
    const PyBufferView view(data, PyBUF_SIMPLE);
    if (view.bytes().size() < kReleaseGilBytes) return crc32c(view.bytes(), crc);
    const GilRelease release;
    return crc32c(view.bytes(), crc);
}

std::vector<std::uint64_t> sample(const py::sequence& addresses, const py::sequence& sizes,
                                  std::uint64_t seed, bool guarded) {
    const IntColumn starts(addresses, "addresses");
    const IntColumn lengths(sizes, "sizes");
    if (starts.size() != lengths.size()) {
        throw py::value_error("addresses has " + std::to_string(starts.size()) +
                              " entries and sizes has " + std::to_string(lengths.size()));
    }
    std::vector<std::span<const std::byte>> regions;
    regions.reserve(starts.size());
    for (std::size_t i = 0; i < starts.size(); ++i) {
        const std::uint64_t nbytes = to_size(lengths[i], "sizes");
        std::byte* const start = to_address(starts.address(i));
        if (start == nullptr && nbytes > 0) throw py::value_error("a region has the null address");
        regions.emplace_back(start, nbytes);
    }
    return sample_words(regions, seed, guarded);
}

}  // namespace
}  // namespace datastates

PYBIND11_MODULE(_native, module) {
    namespace py = pybind11;
    using namespace datastates;  // NOLINT(google-build-using-namespace)
    fork_generation();           // registers its handler in the process that imports

    module.attr("SEGMENT_BYTES") = kSegmentBytes;
    module.attr("BLOCK_BYTES") = kBlockBytes;
    module.attr("MIN_HOST_CACHE_BYTES") = kMinSegments * kSegmentBytes;

    module.def("crc32c", &checksum, py::arg("data"), py::arg("crc") = 0);
    module.def("sample_words", &sample, py::arg("addresses"), py::arg("sizes"), py::arg("seed"),
               py::arg("guarded") = false);

    bind_transfer(module);
    bind_devices(module);
    bind_expected(module);
    bind_streams(module);
    bind_jobs(module);
    bind_failpoints(module);
    bind_engine(module);
}
