#include "memory/strided_region.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace datastates {
namespace {

std::uint64_t checked_multiply(std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > kMaxPosition) {
        throw std::invalid_argument("the region is larger than 2^63 bytes");
    }
    return product;
}

/// A block of equal runs: `rows` times `columns`.
struct Grid {
    std::uint64_t rows = 1;
    Axis row;
    Axis column;
};

template <Direction direction>
void move_bytes(std::byte* stream, std::byte* memory, std::size_t size) {
    if constexpr (direction == Direction::kGather) {
        std::memcpy(stream, memory, size);
    } else {
        std::memcpy(memory, stream, size);
    }
}

/// Copies a grid of runs of `kRun` bytes (0: of `run` bytes, known only now).
template <Direction direction, std::size_t kRun>
void copy_grid(const Grid& grid, std::size_t run, std::byte* stream, std::byte* memory) {
    const std::size_t size = kRun != 0 ? kRun : run;
    const auto stream_step = static_cast<std::int64_t>(grid.column.stream_stride);
    const auto stream_row = static_cast<std::int64_t>(grid.row.stream_stride);
    const std::uint64_t columns = grid.column.size;
    // Where memory is transposed, neighbours in a row are far apart there and neighbours in a
    // column are close: small tiles use each cache line that they touch whole.
    const bool transposed = std::abs(grid.column.memory_stride) > std::abs(grid.row.memory_stride);
    const std::uint64_t tile = transposed && grid.rows > 1 ? 32 : columns;
    for (std::uint64_t left = 0; left < columns; left += tile) {
        const auto count = static_cast<std::int64_t>(std::min(tile, columns - left));
        const auto first = static_cast<std::int64_t>(left);
        for (std::int64_t r = 0; r < static_cast<std::int64_t>(grid.rows); ++r) {
            std::byte* to = stream + r * stream_row + first * stream_step;
            std::byte* from =
                memory + r * grid.row.memory_stride + first * grid.column.memory_stride;
            for (std::int64_t c = 0; c < count; ++c) {
                move_bytes<direction>(to + c * stream_step, from + c * grid.column.memory_stride,
                                      size);
            }
        }
    }
}

template <Direction direction>
void copy_runs(const Grid& grid, std::size_t run, std::byte* stream, std::byte* memory) {
    switch (run) {  // tiny runs: one load and one store each
        case 1:
            return copy_grid<direction, 1>(grid, run, stream, memory);
        case 2:
            return copy_grid<direction, 2>(grid, run, stream, memory);
        case 4:
            return copy_grid<direction, 4>(grid, run, stream, memory);
        case 8:
            return copy_grid<direction, 8>(grid, run, stream, memory);
        case 16:
            return copy_grid<direction, 16>(grid, run, stream, memory);
        default:
            return copy_grid<direction, 0>(grid, run, stream, memory);
    }
}

void copy_runs(Direction direction, const Grid& grid, std::size_t run, std::byte* stream,
               std::byte* memory) {
    if (direction == Direction::kGather) {
        copy_runs<Direction::kGather>(grid, run, stream, memory);
    } else {
        copy_runs<Direction::kScatter>(grid, run, stream, memory);
    }
}

}  // namespace

StridedRegion::StridedRegion(std::uint64_t itemsize, std::span<const Axis> axes) : run_(itemsize) {
    if (itemsize == 0) throw std::invalid_argument("itemsize is 0");
    const bool empty = std::ranges::any_of(axes, [](const Axis& axis) { return axis.size == 0; });
    if (empty) return;
    // From the innermost axis outwards: what it takes in joins the run or the axis inside it.
    std::uint64_t inner = itemsize;  // stream bytes spanned by what is inside the axis
    std::vector<Axis> joined;        // inner to outer
    nbytes_ = itemsize;
    for (std::size_t i = axes.size(); i-- > 0;) {
        const Axis& axis = axes[i];
        if (axis.size == 1) continue;
        if (axis.stream_stride < inner) {
            throw std::invalid_argument(
                "stream_strides[" + std::to_string(i) + "]=" + std::to_string(axis.stream_stride) +
                " is less than the " + std::to_string(inner) +
                " bytes inside it: the stream side is not row-major or overlaps itself");
        }
        const bool joins_run = joined.empty() && axis.stream_stride == run_ &&
                               axis.memory_stride == static_cast<std::int64_t>(run_);
        if (joins_run) {
            run_ = checked_multiply(run_, axis.size);
        } else if (!joined.empty() &&
                   axis.stream_stride ==
                       checked_multiply(joined.back().stream_stride, joined.back().size) &&
                   axis.memory_stride == joined.back().memory_stride *
                                             static_cast<std::int64_t>(joined.back().size)) {
            joined.back().size *= axis.size;
        } else {
            joined.push_back(axis);
            extent_.push_back(inner);
        }
        nbytes_ = checked_multiply(nbytes_, axis.size);
        inner += checked_multiply(axis.stream_stride, axis.size - 1);
        if (inner > kMaxPosition)
            throw std::invalid_argument("the region is larger than 2^63 bytes");
    }
    span_ = inner;
    axes_.assign(joined.rbegin(), joined.rend());
    std::ranges::reverse(extent_);
}

/// A place in the sequence of runs.
class StridedRegion::Cursor {
  public:
    /// At the first run that ends after `position`.
    Cursor(const StridedRegion& region, std::uint64_t position)
        : region_(&region), index_(region.axes_.size(), 0) {
        if (position >= region.span_) {
            at_end_ = true;
            return;
        }
        for (std::size_t i = 0; i < index_.size(); ++i) {
            const Axis& axis = region.axes_[i];
            const std::uint64_t step = std::min(position / axis.stream_stride, axis.size - 1);
            move(i, step);
            position -= step * axis.stream_stride;
            if (position >= region.extent_[i]) {  // in the gap after this step
                advance(i, 1);
                return;
            }
        }
    }

    [[nodiscard]] bool at_end() const { return at_end_; }
    [[nodiscard]] std::uint64_t stream() const { return stream_; }
    [[nodiscard]] std::int64_t memory() const { return memory_; }
    [[nodiscard]] std::uint64_t index(std::size_t axis) const { return index_[axis]; }

    /// `steps` along `axis`, carrying into the axes outside it. All axes inside it are at 0.
    void advance(std::size_t axis, std::uint64_t steps) {
        move(axis, steps);
        while (index_[axis] == region_->axes_[axis].size) {
            if (axis == 0) {
                at_end_ = true;
                return;
            }
            stream_ -= index_[axis] * region_->axes_[axis].stream_stride;
            memory_ -= static_cast<std::int64_t>(index_[axis]) * region_->axes_[axis].memory_stride;
            index_[axis] = 0;
            --axis;
            move(axis, 1);
        }
    }

  private:
    void move(std::size_t axis, std::uint64_t steps) {
        index_[axis] += steps;
        stream_ += steps * region_->axes_[axis].stream_stride;
        memory_ += static_cast<std::int64_t>(steps) * region_->axes_[axis].memory_stride;
    }

    const StridedRegion* region_;
    std::vector<std::uint64_t> index_;
    std::uint64_t stream_ = 0;
    std::int64_t memory_ = 0;
    bool at_end_ = false;
};

Range StridedRegion::next_run(std::uint64_t position) const {
    const Cursor cursor(*this, position);
    if (cursor.at_end()) return {.begin = span_, .end = span_};
    return {.begin = std::max(position, cursor.stream()), .end = cursor.stream() + run_};
}

std::uint64_t StridedRegion::copy(Direction direction, Range part, std::byte* stream,
                                  std::byte* memory) const {
    part.end = std::min(part.end, span_);
    if (part.begin >= part.end) return 0;
    std::uint64_t copied = 0;
    // The run at the cursor, as far as it lies in `part`.
    const auto copy_cut_run = [&](std::uint64_t at, std::int64_t memory_at) {
        const std::uint64_t begin = std::max(part.begin, at);
        const std::uint64_t end = std::min(part.end, at + run_);
        const auto skipped = static_cast<std::int64_t>(begin - at);
        copy_runs(direction, Grid{.rows = 1, .row = {}, .column = {.size = 1}}, end - begin,
                  stream + (begin - part.begin), memory + memory_at + skipped);
        copied += end - begin;
    };
    if (axes_.empty()) {
        copy_cut_run(0, 0);
        return copied;
    }
    const std::size_t inner = axes_.size() - 1;
    Cursor cursor(*this, part.begin);
    while (!cursor.at_end() && cursor.stream() < part.end) {
        const std::uint64_t at = cursor.stream();
        if (at < part.begin || at + run_ > part.end) {
            copy_cut_run(at, cursor.memory());
            cursor.advance(inner, 1);
            continue;
        }
        // As many whole runs of this row as fit; or, at its beginning, as many whole rows.
        const auto fits = [&](std::size_t axis, std::uint64_t extent) {
            if (at + extent > part.end) return std::uint64_t{0};
            const Axis& steps = axes_[axis];
            return std::min(steps.size - cursor.index(axis),
                            (part.end - at - extent) / steps.stream_stride + 1);
        };
        Grid grid{.rows = 1, .row = {}, .column = axes_[inner]};
        std::size_t moved_axis = inner;
        std::uint64_t steps = 0;
        if (inner > 0 && cursor.index(inner) == 0) steps = fits(inner - 1, extent_[inner - 1]);
        if (steps > 0) {
            moved_axis = inner - 1;
            grid.rows = steps;
            grid.row = axes_[moved_axis];
        } else {
            steps = fits(inner, run_);
            grid.column.size = steps;
        }
        copy_runs(direction, grid, run_, stream + (at - part.begin), memory + cursor.memory());
        copied += grid.rows * grid.column.size * run_;
        cursor.advance(moved_axis, steps);
    }
    return copied;
}

void StridedRegion::each_run(
    Range part,
    const std::function<void(std::uint64_t, std::int64_t, std::uint64_t)>& visit) const {
    part.end = std::min(part.end, span_);
    if (part.begin >= part.end) return;
    const auto visit_cut = [&](std::uint64_t at, std::int64_t memory_at) {
        const std::uint64_t begin = std::max(part.begin, at);
        const std::uint64_t end = std::min(part.end, at + run_);
        visit(begin, memory_at + static_cast<std::int64_t>(begin - at), end - begin);
    };
    if (axes_.empty()) {
        visit_cut(0, 0);
        return;
    }
    for (Cursor cursor(*this, part.begin); !cursor.at_end() && cursor.stream() < part.end;
         cursor.advance(axes_.size() - 1, 1)) {
        visit_cut(cursor.stream(), cursor.memory());
    }
}

}  // namespace datastates
