#include "device_stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

namespace datastates::testing {

Layout::Layout(std::uint64_t stream_size, int devices, std::uint64_t max_piece, std::uint64_t seed)
    : size(stream_size) {
    Random random(seed);
    for (int place = kHost; place < devices; ++place) extents[place] = 0;
    const auto add = [&](Piece piece) {
        // The host has a quarter of it.
        const auto drawn = static_cast<int>(random_below(random, 4));
        piece.place = drawn == 0 ? kHost : drawn % devices;
        piece.group = static_cast<Group>(random_below(random, kGroups));
        piece.memory_at = extents[piece.place];
        extents[piece.place] += piece.rows * piece.memory_stride;
        pieces.push_back(piece);
    };
    for (std::uint64_t at = 0; at < size;) {
        const std::uint64_t length = std::min(size - at, 64 + random_below(random, max_piece));
        const std::uint64_t rows = 2 + random_below(random, 6);
        const std::uint64_t width = length / rows;
        const std::uint64_t kind = random_below(random, 6);
        if (kind < 3 || width < 2) {
            if (kind != 0) add({.width = length, .at = at, .memory_stride = length});
        } else if (kind == 3) {
            add({.rows = rows,
                 .width = width,
                 .at = at,
                 .stride = width,
                 .memory_stride = width + 16});
        } else {
            const std::uint64_t left = 1 + random_below(random, width - 1);
            for (const auto& [begin, each] :
                 {std::pair{std::uint64_t{0}, left}, std::pair{left, width - left}}) {
                add({.rows = rows,
                     .width = each,
                     .at = at + begin,
                     .stride = width,
                     .memory_stride = each});
            }
        }
        at += length;
    }
}

Image random_image(const Layout& layout, std::uint64_t seed) {
    Image image;
    for (const auto& [place, extent] : layout.extents) {
        image[place] = random_bytes(extent, seed * 16 + static_cast<std::uint64_t>(place + 1));
    }
    return image;
}

Bytes stream_of(const Layout& layout, const Image& image) {
    Bytes stream(layout.size);
    for (const Layout::Piece& piece : layout.pieces) {
        const Bytes& memory = image.at(piece.place);
        for (std::uint64_t row = 0; row < piece.rows; ++row) {
            std::memcpy(stream.data() + piece.at + row * piece.stride,
                        memory.data() + piece.memory_at + row * piece.memory_stride, piece.width);
        }
    }
    return stream;
}

Tensors::Tensors(const Layout& layout) : layout_(&layout), host_(layout.extents.at(kHost)) {
    for (const auto& [place, extent] : layout.extents) {
        memory_[place] = place == kHost ? std::span(host_)
                                        : device_memory(place, std::max<std::uint64_t>(1, extent));
    }
}

Transfer Tensors::transfer() const {
    Transfer transfer;
    for (const Layout::Piece& piece : layout_->pieces) {
        std::byte* const address = memory(piece.place).data() + piece.memory_at;
        if (piece.rows == 1) {
            transfer.add(piece.at, piece.width, address, piece.group, Access::kReadWrite,
                         piece.place);
            continue;
        }
        const std::array axes{
            Axis{.size = piece.rows,
                 .stream_stride = piece.stride,
                 .memory_stride = static_cast<std::int64_t>(piece.memory_stride)}};
        transfer.add_strided(piece.at, piece.width, axes, address, piece.group, piece.place);
    }
    return transfer;
}

SaveFile Tensors::save_file(const std::string& path) const {
    return {path, layout_->size, transfer()};
}

RestoreFile Tensors::restore_file(const std::string& path) const {
    return {path, file_bytes(layout_->size), layout_->size, transfer()};
}

Image Tensors::image() const {
    Image image;
    for (const auto& [place, extent] : layout_->extents) {
        const auto begin = memory(place).begin();
        image[place] = Bytes(begin, begin + static_cast<std::ptrdiff_t>(extent));
    }
    return image;
}

void Tensors::write_host(const Image& image) const {
    std::ranges::copy(image.at(kHost), memory(kHost).begin());
}

Training::Training(int devices) {
    for (int device = 0; device < devices; ++device) streams_[device] = training_stream(device);
}

void Training::write(const Tensors& tensors, const Image& image) const {
    for (const auto& [device, stream] : streams_) {
        const Bytes& bytes = image.at(device);
        const int result = fake_cuda_write(device, stream, tensors.memory(device).data(),
                                           bytes.data(), bytes.size());
        check_equal(result, 0);
    }
}

Fences Training::fences(const Engine& engine) const {
    Fences fences;
    for (const auto& [device, stream] : streams_) {
        fences.push_back(value_of(engine.devices().find(device)->record(stream)));
    }
    return fences;
}

void Training::hold(const SaveHandle& save, Group group) const {
    for (const auto& event : save->events(group)) {
        check_ok(event->device()->hold(stream(event->device()->number()), *event));
    }
}

void open_devices(const Engine& engine, int devices) {
    for (int device = 0; device < devices; ++device) check_ok(engine.devices().open(device));
    wait_until_prepared(engine);
}

void wait_until_prepared(const Engine& engine) {
    wait_until("devices are never prepared", [&] { return engine.devices().pinner().idle(); });
    check_ok(engine.devices().pinner().fault());
    check_equal(engine.devices().pinner().pinned_bytes(),
                engine.cache().stats().total_segments * kSegmentBytes);
}

void check_nothing_left() {
    check_equal(fake_cuda_count("live_events"), 0U);
    check_equal(fake_cuda_count("live_streams"), 0U);
    check_equal(fake_cuda_count("live_registrations"), 0U);
    check_equal(fake_cuda_count("early_unregistrations"), 0U);
    check_equal(fake_cuda_count("violations"), 0U);
}

}  // namespace datastates::testing
