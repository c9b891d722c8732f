// Which memory is a device's, and which of the host's is pinned. Guarded by the driver's mutex.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>

#include "device/cuda_abi.h"

namespace datastates::fake_cuda {

/// Addresses, from the first to past the last.
struct Addresses {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;

    [[nodiscard]] bool contains(const Addresses& other) const {
        return begin <= other.begin && other.end <= end;
    }
    [[nodiscard]] bool overlaps(const Addresses& other) const {
        return begin < other.end && other.begin < end;
    }
};

Addresses addresses_of(const void* data, std::uint64_t nbytes);
std::byte* bytes_at(cuda::DevicePointer address);

/// Pinned host memory.
struct Registration {
    Addresses memory;
    int device = 0;  ///< in whose context
    bool portable = false;
    std::uint64_t uses = 0;  ///< by copies that are not done
};

class Memory {
  public:
    void* allocate(int device, std::uint64_t nbytes);
    bool free(void* data);
    void adopt(int device, const Addresses& memory);
    bool disown(std::uintptr_t begin);

    /// True if all of it is memory of `device`.
    [[nodiscard]] bool is_of_device(int device, const Addresses& memory) const;

    cuda::Result register_host(const Addresses& memory, int device, bool portable);
    /// Null if there is none that begins there.
    std::shared_ptr<Registration> unregister_host(std::uintptr_t begin);
    /// Of a context that ends.
    void unregister_all(int device);
    [[nodiscard]] std::size_t registrations() const { return registrations_.size(); }

    /// Finds what pins `memory` for `device`; null if nothing does. Fails if it is a device's, or
    /// pinned in part, or in two parts.
    [[nodiscard]] cuda::Result find_pinned(int device, const Addresses& memory,
                                           std::shared_ptr<Registration>& found) const;

  private:
    static constexpr std::align_val_t kAlignment{256};  // a driver's

    struct Freed {
        void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
    };
    struct DeviceMemory {
        int device = 0;
        std::uintptr_t end = 0;
        std::unique_ptr<std::byte, Freed> owned;  ///< null if it is another's
    };

    std::multimap<std::uintptr_t, DeviceMemory> device_memory_;  // by where it begins
    std::map<std::uintptr_t, std::shared_ptr<Registration>> registrations_;
};

}  // namespace datastates::fake_cuda
