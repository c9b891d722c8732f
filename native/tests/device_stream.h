// Streams of files whose bytes are on the host and on devices, and the training process that
// changes them.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/immovable.h"
#include "device_support.h"
#include "pipeline/engine.h"
#include "support.h"

namespace datastates::testing {

inline constexpr Group kGroups = 3;

/// What is where: in the stream, and in the memory of a place (the host or a device).
struct Layout {
    /// One or several rows of bytes: contiguous, strided in memory, or interlocked with another
    /// piece in the stream.
    struct Piece {
        int place = kHost;
        Group group = 0;
        std::uint64_t rows = 1;
        std::uint64_t width = 0;
        std::uint64_t at = 0;
        std::uint64_t stride = 0;
        std::uint64_t memory_at = 0;
        std::uint64_t memory_stride = 0;
    };

    /// A stream of `size` bytes on the host and so many devices, in pieces of up to `max_piece`.
    Layout(std::uint64_t size, int devices, std::uint64_t max_piece, std::uint64_t seed);

    std::uint64_t size;
    std::vector<Piece> pieces;
    std::map<int, std::uint64_t> extents;  // bytes of memory, by place
};

/// Bytes by place.
using Image = std::map<int, Bytes>;

Image random_image(const Layout& layout, std::uint64_t seed);

/// The stream that memory of this content makes.
Bytes stream_of(const Layout& layout, const Image& image);

/// Memory of a layout: the host's, and that of fake devices, which a reset frees.
class Tensors {
  public:
    explicit Tensors(const Layout& layout);

    [[nodiscard]] const Layout& layout() const { return *layout_; }
    [[nodiscard]] Transfer transfer() const;
    [[nodiscard]] SaveFile save_file(const std::string& path) const;
    [[nodiscard]] RestoreFile restore_file(const std::string& path) const;
    [[nodiscard]] Image image() const;
    [[nodiscard]] std::span<std::byte> memory(int place) const { return memory_.at(place); }

    void write_host(const Image& image) const;

  private:
    const Layout* layout_;
    Bytes host_;
    std::map<int, std::span<std::byte>> memory_;
};

/// The streams that kernels run on, one per device.
class Training {
  public:
    explicit Training(int devices);

    [[nodiscard]] StreamHandle stream(int device) const { return streams_.at(device); }
    /// Enqueues kernels that make the devices' part of `tensors` what it is in `image`.
    void write(const Tensors& tensors, const Image& image) const;
    /// Events after all that is enqueued by now.
    [[nodiscard]] Fences fences(const Engine& engine) const;
    /// Makes later kernels wait until `group` has been read.
    void hold(const SaveHandle& save, Group group) const;

  private:
    std::map<int, StreamHandle> streams_;
};

/// Devices hang, as long as this lives: to be declared after the handles that will wait for them.
class Stall : public Immovable {
  public:
    Stall() { fake_cuda_stall(1); }
    ~Stall() { fake_cuda_stall(0); }
};

/// Opens devices, and waits until the cache is pinned.
void open_devices(const Engine& engine, int devices);
void wait_until_prepared(const Engine& engine);

/// Nothing of the engine's is left in the driver.
void check_nothing_left();

}  // namespace datastates::testing
