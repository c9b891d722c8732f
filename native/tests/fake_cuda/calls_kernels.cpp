// Modules, and kernels of them: what these may touch is checked while they run.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "calls.h"
#include "driver.h"

namespace datastates::cuda {
namespace {

using fake_cuda::Addresses;
using fake_cuda::Caller;
using fake_cuda::Driver;
using fake_cuda::Extent;
using fake_cuda::Kernel;
using fake_cuda::Needs;
using fake_cuda::Registration;

template <typename Body>
Result call(const char* symbol, Needs needs, const Body& body) {
    return Driver::instance().call(symbol, needs, body);
}

/// As threads of a device: see Scheduler.
[[gnu::no_sanitize("thread")]] void move_unseen(std::byte* to, const std::byte* from,
                                                std::uint32_t nbytes) {
    for (std::uint32_t n = 0; n < nbytes; ++n) {
        reinterpret_cast<volatile std::byte*>(to)[n] =
            reinterpret_cast<const volatile std::byte*>(from)[n];
    }
}

/// One launch, while it runs.
class Launched {
  public:
    Launched(Driver& driver, int device, std::shared_ptr<const Kernel> kernel, Extent grid,
             Extent block, std::vector<std::byte> parameters)
        : driver_(driver),
          device_(device),
          kernel_(std::move(kernel)),
          grid_(grid),
          block_(block),
          parameters_(std::move(parameters)) {}

    /// In a thread of the driver's, without its mutex: the blocks, in any order.
    void run() {
        std::uint64_t number = 0;
        driver_.arrange([&](Driver& driver) {
            number = driver.counts.kernels++;
            manners_ = driver.scheduler.manners();
            spoilt_ = driver.spoil_kernels;
        });
        std::mt19937_64 random(manners_.seed + number);
        std::vector<Extent> places;
        for (std::uint32_t y = 0; y < grid_.y; ++y) {
            for (std::uint32_t x = 0; x < grid_.x; ++x) places.push_back({.x = x, .y = y});
        }
        std::ranges::shuffle(places, random);
        const Kernel::Access access{
            .load = [this](auto... args) { return load(args...); },
            .store = [this](auto... args) { return store(args...); },
        };
        for (const Extent place : places) {
            if (!kernel_->run(grid_, block_, place, parameters_, access)) {
                fail();
                return;
            }
            if (random() % 32 == 0) pause(random);
        }
        driver_.arrange([&](Driver& driver) { driver.counts.bytes_to_host += stored_; });
    }

  private:
    bool load(std::uint64_t address, std::byte* to, std::uint32_t nbytes) {
        if (!may(address, nbytes, loaded_from_, true)) return false;
        move_unseen(to, fake_cuda::bytes_at(address), nbytes);
        return true;
    }

    bool store(std::uint64_t address, const std::byte* from, std::uint32_t nbytes) {
        if (!may(address, nbytes, stored_to_, false)) return false;
        std::array<std::byte, 16> bytes{};
        std::memcpy(bytes.data(), from, nbytes);
        if (spoilt_) bytes[0] ^= std::byte{1};
        move_unseen(fake_cuda::bytes_at(address), bytes.data(), nbytes);
        stored_ += nbytes;
        return true;
    }

    /// Whether kernels on the device reach that memory. `known` does: it is where the last one was.
    bool may(std::uint64_t address, std::uint32_t nbytes, Addresses& known, bool of_device) {
        const auto asked = fake_cuda::addresses_of(fake_cuda::bytes_at(address), nbytes);
        if (known.contains(asked)) return true;
        return driver_.arrange([&](Driver& driver) {
            std::shared_ptr<Registration> pinned;
            const Result found = driver.memory.find_pinned(device_, asked, pinned);
            if (found == kSuccess && pinned != nullptr) {
                known = pinned->memory;
                return true;
            }
            if (!of_device || !driver.memory.is_of_device(device_, asked)) return false;
            known = driver.memory.around(device_, asked);
            return true;
        });
    }

    void fail() {
        driver_.arrange([](Driver& driver) {
            ++driver.counts.violations;
            driver.poison = kIllegalAddress;
            driver.scheduler.drop_all();
        });
    }

    void pause(std::mt19937_64& random) const {
        const auto longest = static_cast<std::uint64_t>(manners_.max_delay.count());
        if (longest == 0) return;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
    }

    Driver& driver_;
    const int device_;
    const std::shared_ptr<const Kernel> kernel_;
    const Extent grid_;
    const Extent block_;
    const std::vector<std::byte> parameters_;
    fake_cuda::Scheduler::Manners manners_;
    bool spoilt_ = false;
    Addresses loaded_from_;
    Addresses stored_to_;
    std::uint64_t stored_ = 0;
};

/// What the parameters point to that is pinned: it must stay so until the kernel is done.
std::vector<std::shared_ptr<Registration>> used_by(const Driver& driver, int device,
                                                   const std::vector<std::byte>& parameters) {
    std::vector<std::shared_ptr<Registration>> used;
    for (std::size_t at = 0; at + 8 <= parameters.size(); at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, parameters.data() + at, sizeof(word));
        std::shared_ptr<Registration> pinned;
        const auto byte = fake_cuda::addresses_of(fake_cuda::bytes_at(word), 1);
        if (driver.memory.find_pinned(device, byte, pinned) == kSuccess && pinned != nullptr &&
            std::ranges::find(used, pinned) == used.end()) {
            used.push_back(pinned);
        }
    }
    return used;
}

}  // namespace

Result cuModuleLoadData(Module* module, const void* image) {
    return call("cuModuleLoadData", Needs::kContext, [&](Driver& driver, Caller& caller) -> Result {
        const Result unsafe = driver.streams.check_unsafe(driver.this_thread().capture_mode);
        if (unsafe != kSuccess) return unsafe;
        *module = driver.modules.load(caller.device, static_cast<const char*>(image));
        return kSuccess;
    });
}

Result cuModuleGetFunction(Function* function, Module module, const char* name) {
    return call("cuModuleGetFunction", Needs::kContext, [&](Driver& driver, Caller& caller) {
        return driver.modules.find(caller.device, module, name, *function);
    });
}

Result cuMemHostGetDevicePointer_v2(DevicePointer* pointer, void* data, unsigned flags) {
    return call("cuMemHostGetDevicePointer_v2", Needs::kContext,
                [&](Driver& driver, Caller& caller) -> Result {
                    std::shared_ptr<Registration> pinned;
                    const auto byte = fake_cuda::addresses_of(data, 1);
                    const Result found = driver.memory.find_pinned(caller.device, byte, pinned);
                    if (flags != 0 || found != kSuccess || pinned == nullptr) return kInvalidValue;
                    *pointer = byte.begin;
                    return kSuccess;
                });
}

Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_nbytes,
                      Stream stream, void** parameters, void** extra) {
    return call("cuLaunchKernel", Needs::kContext, [&](Driver& driver, Caller& caller) -> Result {
        constexpr unsigned kMostThreads = 1024;
        const fake_cuda::Function* const found = driver.modules.function(function);
        fake_cuda::Stream* const of = driver.streams.stream(caller.device, stream);
        if (found == nullptr || found->device != caller.device || of == nullptr) {
            return kInvalidHandle;
        }
        if (of->device != caller.device) return kInvalidContext;
        const bool is_flat = grid_z == 1 && block_y == 1 && block_z == 1 && shared_nbytes == 0;
        if (grid_x == 0 || grid_y == 0 || grid_y > 65535 || block_x == 0 ||
            block_x > kMostThreads || !is_flat || extra != nullptr) {
            return kInvalidValue;
        }
        const auto* const first = static_cast<const std::byte*>(parameters[0]);
        std::vector<std::byte> copied(first, first + found->kernel->parameter_nbytes());
        auto used = used_by(driver, caller.device, copied);
        for (const auto& registration : used) ++registration->uses;
        auto launched = std::make_shared<Launched>(driver, caller.device, found->kernel,
                                                   Extent{.x = grid_x, .y = grid_y},
                                                   Extent{.x = block_x, .y = 1}, std::move(copied));
        auto work = std::make_shared<fake_cuda::Work>();
        work->kernel = [launched] { launched->run(); };
        work->when_finished = [used = std::move(used)] {
            for (const auto& registration : used) --registration->uses;
        };
        return driver.streams.enqueue(*of, work);
    });
}

}  // namespace datastates::cuda
