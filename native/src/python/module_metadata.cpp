// Bindings: writing metadata from columns.

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "metadata/metadata_pickle.h"
#include "python/python_arguments.h"
#include "python/python_gil.h"
#include "python/python_support.h"

namespace datastates {
namespace {

/// An attribute of a Catalog or Placement.
class Attribute : public IntArray {
  public:
    Attribute(const py::handle& columns, const char* name)
        : IntArray(py::object(columns.attr(name)), name) {}
};

py::bytes metadata_pickle(const py::buffer& opcodes, std::int64_t memo_size,
                          const py::handle& words, const py::handle& names, const py::handle& table,
                          const py::handle& paths, const py::handle& catalog,
                          const py::handle& placement) {
    const PyBufferView before(opcodes, PyBUF_SIMPLE);
    const IntArray words_view(words, "words");
    const IntArray names_view(names, "names");
    const IntArray table_view(table, "table");
    const IntArray paths_view(paths, "paths");
    const MetadataPrelude prelude{
        .opcodes = before.bytes(),
        .memo_size = memo_size,
        .words = words_view.values(),
        .names = names_view.values(),
        .table = table_view.values(),
        .paths = paths_view.values(),
    };
    const Attribute properties(catalog, "properties");
    const Attribute ndims(catalog, "ndims");
    const Attribute shapes(catalog, "shapes");
    const Attribute counts(catalog, "counts");
    const Attribute offsets(catalog, "offsets");
    const Attribute sizes(catalog, "sizes");
    const Attribute chunk_files(placement, "chunk_files");
    const Attribute chunk_offsets(placement, "chunk_offsets");
    const Attribute chunk_lengths(placement, "chunk_lengths");
    const Attribute object_files(placement, "object_files");
    const Attribute object_offsets(placement, "object_offsets");
    const Attribute object_lengths(placement, "object_lengths");
    const MetadataColumns columns{
        .properties = properties.values(),
        .ndims = ndims.values(),
        .shapes = shapes.values(),
        .counts = counts.values(),
        .offsets = offsets.values(),
        .sizes = sizes.values(),
        .chunk_files = chunk_files.values(),
        .chunk_offsets = chunk_offsets.values(),
        .chunk_lengths = chunk_lengths.values(),
        .object_files = object_files.values(),
        .object_offsets = object_offsets.values(),
        .object_lengths = object_lengths.values(),
    };

    // Written where Python will have it: pages of the bound that are not written are never there.
    const std::size_t bound = metadata_pickle_bound(prelude, columns);
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bound));
    auto holder = py::reinterpret_steal<py::bytes>(made);
    if (!holder) throw py::error_already_set();
    auto* const start = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(made));
    std::size_t written = 0;
    {
        const GilRelease release;
        written = write_metadata_pickle(prelude, columns, {start, bound});
    }
    holder.release();  // the one reference, which resizing replaces
    if (_PyBytes_Resize(&made, static_cast<Py_ssize_t>(written)) != 0) {
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::bytes>(made);
}

}  // namespace

void bind_metadata(py::module_& module) {
    module.def("metadata_pickle", &metadata_pickle, py::arg("opcodes"), py::arg("memo_size"),
               py::arg("words"), py::arg("names"), py::arg("table"), py::arg("paths"),
               py::arg("catalog"), py::arg("placement"));
}

}  // namespace datastates
