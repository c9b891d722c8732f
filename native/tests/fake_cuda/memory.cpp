#include "memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace datastates::fake_cuda {

Addresses addresses_of(const void* data, std::uint64_t nbytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return {.begin = begin, .end = begin + nbytes};
}

std::byte* bytes_at(cuda::DevicePointer address) {
    return std::bit_cast<std::byte*>(address);
}

void* Memory::allocate(int device, std::uint64_t nbytes) {
    if (nbytes == 0) return nullptr;
    std::unique_ptr<std::byte, Freed> data(
        static_cast<std::byte*>(::operator new(nbytes, kAlignment, std::nothrow)));
    if (data == nullptr) return nullptr;
    std::memset(data.get(), 0xCD, nbytes);
    std::byte* const begin = data.get();
    device_memory_.emplace(
        reinterpret_cast<std::uintptr_t>(begin),
        DeviceMemory{
            .device = device, .end = addresses_of(begin, nbytes).end, .owned = std::move(data)});
    return begin;
}

bool Memory::free(void* data) {
    const auto [first, last] = device_memory_.equal_range(reinterpret_cast<std::uintptr_t>(data));
    const auto found =
        std::find_if(first, last, [](const auto& each) { return each.second.owned != nullptr; });
    if (found == last) return false;
    device_memory_.erase(found);
    return true;
}

void Memory::adopt(int device, const Addresses& memory) {
    device_memory_.emplace(memory.begin,
                           DeviceMemory{.device = device, .end = memory.end, .owned = nullptr});
}

bool Memory::disown(std::uintptr_t begin) {
    const auto [first, last] = device_memory_.equal_range(begin);
    const auto found =
        std::find_if(first, last, [](const auto& each) { return each.second.owned == nullptr; });
    if (found == last) return false;
    device_memory_.erase(found);
    return true;
}

bool Memory::is_of_device(int device, const Addresses& memory) const {
    const auto after = device_memory_.upper_bound(memory.begin);
    if (after != device_memory_.begin()) {  // nearly always it lies in one range
        const DeviceMemory& before = std::prev(after)->second;
        if (before.device == device && memory.end <= before.end) return true;
    }
    std::uintptr_t known = memory.begin;  // up to here it is the device's
    for (const auto& [begin, range] : device_memory_) {
        if (begin > known) break;
        if (range.device == device) known = std::max(known, range.end);
    }
    return known > memory.begin && known >= memory.end;
}

cuda::Result Memory::register_host(const Addresses& memory, int device, bool portable) {
    if (memory.end <= memory.begin) return cuda::kInvalidValue;
    for (const auto& [begin, registration] : registrations_) {
        if (registration->memory.overlaps(memory)) return cuda::kHostMemoryAlreadyRegistered;
    }
    for (const auto& [begin, range] : device_memory_) {
        if (memory.overlaps({.begin = begin, .end = range.end})) return cuda::kInvalidValue;
    }
    registrations_.emplace(
        memory.begin, std::make_shared<Registration>(Registration{
                          .memory = memory, .device = device, .portable = portable, .uses = 0}));
    return cuda::kSuccess;
}

std::shared_ptr<Registration> Memory::unregister_host(std::uintptr_t begin) {
    const auto found = registrations_.find(begin);
    if (found == registrations_.end()) return nullptr;
    auto registration = std::move(found->second);
    registrations_.erase(found);
    return registration;
}

void Memory::unregister_all(int device) {
    std::erase_if(registrations_,
                  [device](const auto& each) { return each.second->device == device; });
}

cuda::Result Memory::find_pinned(int device, const Addresses& memory,
                                 std::shared_ptr<Registration>& found) const {
    found.reset();
    const auto after = registrations_.upper_bound(memory.begin);
    if (after != registrations_.begin()) {
        const auto& before = std::prev(after)->second;
        if (before->memory.contains(memory)) {
            if (before->portable || before->device == device) found = before;
            return cuda::kSuccess;
        }
        if (before->memory.overlaps(memory)) return cuda::kInvalidValue;
    }
    if (after != registrations_.end() && after->second->memory.overlaps(memory)) {
        return cuda::kInvalidValue;
    }
    const bool is_devices = std::ranges::any_of(device_memory_, [&](const auto& each) {
        return memory.overlaps({.begin = each.first, .end = each.second.end});
    });
    return is_devices ? cuda::kInvalidValue : cuda::kSuccess;
}

}  // namespace datastates::fake_cuda
