#include "memory/transfer.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <stdexcept>
#include <utility>

#include "memory/guarded_copy.h"

namespace datastates {
namespace {

std::string to_text(const Region& region) {
    return "[" + std::to_string(region.offset) + ", " + std::to_string(region.end) + ")";
}

[[noreturn]] void refuse_overlap(const Region& a, const Region& b) {
    throw std::invalid_argument("regions " + to_text(a) + " and " + to_text(b) +
                                " overlap in the stream");
}

Range next_run(const Region& region, std::uint64_t position) {
    if (!region.strided) return {.begin = std::max(position, region.offset), .end = region.end};
    const std::uint64_t skipped = position > region.offset ? position - region.offset : 0;
    const Range run = region.strided->next_run(skipped);
    return {.begin = run.begin + region.offset, .end = run.end + region.offset};
}

/// Strided regions may interlock without overlapping (two column ranges of one array): then only a
/// walk over their runs, in the order of the stream, can tell. It costs about what copying them
/// does.
void check_interlocked(std::span<const Region> regions) {
    struct Next {
        Range run;
        const Region* region;
    };
    const auto later = [](const Next& a, const Next& b) { return a.run.begin > b.run.begin; };
    std::priority_queue<Next, std::vector<Next>, decltype(later)> queue(later);
    for (const Region& region : regions) queue.push({next_run(region, 0), &region});
    Next previous{.run = {}, .region = nullptr};
    while (!queue.empty()) {
        const Next next = queue.top();
        queue.pop();
        if (previous.region != nullptr && next.run.begin < previous.run.end) {
            refuse_overlap(*previous.region, *next.region);
        }
        previous = next;
        const Range run = next_run(*next.region, next.run.end);
        if (run.size() > 0 && run.begin < next.region->end) queue.push({run, next.region});
    }
}

void count(std::vector<GroupBytes>& groups, Group group, std::uint64_t nbytes) {
    if (groups.empty() || groups.back().group != group) groups.push_back({group, 0});
    groups.back().nbytes += nbytes;
}

}  // namespace

std::uint64_t Region::copy(Direction direction, Range part, std::byte* stream) const {
    const std::uint64_t begin = std::max(part.begin, offset);
    const std::uint64_t finish = std::min(part.end, end);
    if (begin >= finish) return 0;
    std::byte* const at = stream + (begin - part.begin);
    const Range inside{.begin = begin - offset, .end = finish - offset};
    if (strided) return strided->copy(direction, inside, at, address);
    if (direction == Direction::kGather) {
        std::memcpy(at, address + inside.begin, inside.size());
    } else {
        std::memcpy(address + inside.begin, at, inside.size());
    }
    return inside.size();
}

std::uint64_t Region::list(Direction direction, Range part, std::byte* stream,
                           std::vector<DeviceCopy>& copies) const {
    const std::uint64_t begin = std::max(part.begin, offset);
    const std::uint64_t finish = std::min(part.end, end);
    if (begin >= finish) return 0;
    std::byte* const origin =
        stream - part.begin + offset;  // where the region's first byte would be
    std::uint64_t listed = 0;
    const auto add = [&](std::uint64_t at, std::int64_t memory_at, std::uint64_t nbytes) {
        if (direction == Direction::kGather) {
            copies.push_back({.to = origin + at, .from = address + memory_at, .nbytes = nbytes});
        } else {
            copies.push_back({.to = address + memory_at, .from = origin + at, .nbytes = nbytes});
        }
        listed += nbytes;
    };
    const Range inside{.begin = begin - offset, .end = finish - offset};
    if (strided) {
        strided->each_run(inside, add);
    } else {
        add(inside.begin, static_cast<std::int64_t>(inside.begin), inside.size());
    }
    return listed;
}

bool Region::touches(Range part) const {
    if (part.begin >= end || part.end <= offset) return false;
    return !strided || next_run(*this, part.begin).begin < std::min(part.end, end);
}

void Transfer::add(std::uint64_t offset, std::uint64_t nbytes, std::byte* address, Group group,
                   Access access, int device) {
    if (offset > kMaxPosition || nbytes > kMaxPosition - offset) {
        throw std::invalid_argument("region of " + std::to_string(nbytes) + " bytes at offset " +
                                    std::to_string(offset) + " ends beyond 2^63");
    }
    push(Region{.offset = offset,
                .end = offset + nbytes,
                .address = address,
                .group = group,
                .strided = nullptr,
                .access = access,
                .device = device});
}

void Transfer::add_strided(std::uint64_t offset, std::uint64_t itemsize, std::span<const Axis> axes,
                           std::byte* address, Group group, int device) {
    auto strided = std::make_shared<const StridedRegion>(itemsize, axes);
    if (strided->contiguous()) {
        add(offset, strided->nbytes(), address, group, Access::kReadWrite, device);
        return;
    }
    if (offset > kMaxPosition || strided->span() > kMaxPosition - offset) {
        throw std::invalid_argument("strided region at offset " + std::to_string(offset) +
                                    " ends beyond 2^63");
    }
    const std::uint64_t end = offset + strided->span();
    push(Region{.offset = offset,
                .end = end,
                .address = address,
                .group = group,
                .strided = std::move(strided),
                .access = Access::kReadWrite,
                .device = device});
}

void Transfer::append(const Transfer& other) {
    regions_.insert(regions_.end(), other.regions_.begin(), other.regions_.end());
    nbytes_ += other.nbytes_;
}

void Transfer::push(Region region) {
    if (region.group < 0) {
        throw std::invalid_argument("group=" + std::to_string(region.group) + " is negative");
    }
    if (region.device < kHost) {
        throw std::invalid_argument("device=" + std::to_string(region.device) + " is below -1");
    }
    if (region.end == region.offset) return;
    if (region.address == nullptr) {
        throw std::invalid_argument("region " + to_text(region) + " has the null address");
    }
    nbytes_ += region.nbytes();
    regions_.push_back(std::move(region));
}

StreamContent::StreamContent(const Transfer& transfer)
    : regions_(transfer.regions()), nbytes_(transfer.nbytes()) {
    const auto by_offset = [](const Region& a, const Region& b) { return a.offset < b.offset; };
    if (!std::ranges::is_sorted(regions_, by_offset)) std::ranges::stable_sort(regions_, by_offset);
    reach_.reserve(regions_.size());
    for (const Region& region : regions_) {
        reach_.push_back(reach_.empty() ? region.end : std::max(reach_.back(), region.end));
        if (region.device != kHost &&
            std::ranges::find(devices_, region.device) == devices_.end()) {
            devices_.push_back(region.device);
        }
    }
    check_overlaps();
}

void StreamContent::check_overlaps() const {
    // Regions fall into clusters whose spans do not meet; only strided ones may have several.
    for (std::size_t first = 0; first < regions_.size();) {
        std::size_t last = first + 1;
        bool has_strided = regions_[first].strided != nullptr;
        while (last < regions_.size() && regions_[last].offset < reach_[last - 1]) {
            has_strided = has_strided || regions_[last].strided != nullptr;
            if (!has_strided) refuse_overlap(regions_[last - 1], regions_[last]);
            ++last;
        }
        if (last - first > 1) check_interlocked(std::span(regions_).subspan(first, last - first));
        first = last;
    }
}

bool StreamContent::has_read_only() const {
    return std::ranges::any_of(
        regions_, [](const Region& region) { return region.access == Access::kReadOnly; });
}

std::span<const Region> StreamContent::near(Range part) const {
    const auto first = std::ranges::upper_bound(reach_, part.begin) - reach_.begin();
    const auto last = std::ranges::lower_bound(regions_, part.end, {}, &Region::offset);
    const auto count = last - (regions_.begin() + first);
    return {regions_.data() + first, static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, count))};
}

StreamContent::Filled StreamContent::fill(Range part, std::byte* out) const {
    std::vector<GroupBytes> copied;
    std::vector<DeviceCopy> guarded;   // made last: what they write is zeroed before
    std::uint64_t clean = part.begin;  // what comes before holds bytes of regions, or zeros
    const auto zero_until = [&](std::uint64_t end) {
        if (end <= clean) return;
        std::memset(out + (clean - part.begin), 0, end - clean);
        clean = end;
    };
    for (const Region& region : near(part)) {
        const std::uint64_t end = std::min(part.end, region.end);
        zero_until(region.offset);
        if (region.strided) {
            zero_until(end);  // its own gaps
        } else {
            clean = std::max(clean, end);
        }
        if (region.device != kHost) continue;
        count(copied, region.group,
              region.group == kStableGroup ? region.copy(Direction::kGather, part, out)
                                           : region.list(Direction::kGather, part, out, guarded));
    }
    zero_until(part.end);
    const int error = copy_guarded(guarded);
    return {.groups = std::move(copied), .unstable = std::move(guarded), .error = error};
}

void StreamContent::copy(Direction direction, Range part, std::byte* stream) const {
    for (const Region& region : near(part)) {
        if (region.device == kHost) region.copy(direction, part, stream);
    }
}

void StreamContent::list(Direction direction, Range part, std::byte* stream,
                         std::map<int, DeviceWork>& work) const {
    if (devices_.empty()) return;
    for (const Region& region : near(part)) {
        if (region.device == kHost || !region.touches(part)) continue;  // it may have gaps
        DeviceWork& mine = work[region.device];
        count(mine.groups, region.group, region.list(direction, part, stream, mine.copies));
    }
}

bool StreamContent::touches(Range part) const {
    return std::ranges::any_of(near(part),
                               [&](const Region& region) { return region.touches(part); });
}

}  // namespace datastates
