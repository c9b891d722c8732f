// The kernel that copies many small pieces: that it does, when it is used, and when it is not. Its
// code runs in the fake driver, which interprets it.

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda_kernel.h"
#include "device_stream.h"
#include "device_support.h"
#include "hooked_device_api.h"
#include "small_copies.h"

namespace datastates::testing {
namespace {

constexpr std::uint64_t kCache = kMinSegments * kSegmentBytes;

/// Pieces of a device's memory at all alignments, and places for them.
struct Pieces {
    Pieces(DeviceApi& api, std::uint64_t count, std::uint64_t max_nbytes, std::uint64_t seed)
        : device(device_memory(0, count * (max_nbytes + 32))),
          pinned(api, device.size()),
          expected(device.size()) {
        Random random(seed);
        std::ranges::copy(random_bytes(device.size(), seed), device.begin());
        std::uint64_t at = 0;
        for (std::uint64_t n = 0; n < count; ++n) {
            const std::uint64_t nbytes = random_below(random, max_nbytes + 1);
            const std::uint64_t to = at + random_below(random, 16);
            const std::uint64_t from = at + random_below(random, 16);
            copies.push_back(
                {.to = pinned.data() + to, .from = device.data() + from, .nbytes = nbytes});
            std::copy_n(copies.back().from, nbytes,
                        expected.begin() + static_cast<std::ptrdiff_t>(to));
            at += (max_nbytes + 32) / 16 * 16;
        }
    }

    std::span<std::byte> device;
    PinnedMemory pinned;
    std::vector<DeviceCopy> copies;
    Bytes expected;
};

void pieces_of_all_sizes_and_alignments_are_copied() {
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        const FakeDriver driver(seed);
        Entered entered(*driver.api, 0);
        KernelHandle kernel = 0;
        check_ok(driver.api->load_kernel(kernel));
        const std::uint64_t count = 1 + seed * 37;  // of one launch, and of several
        Pieces pieces(*driver.api, count, seed % 3 == 0 ? 40'000 : 300, seed);
        check_ok(driver.api->copy_by_kernel(kernel, pieces.copies, entered.stream()));
        check_equal(fake_cuda_synchronize_all(60), 0);
        check(pieces.pinned.bytes() == pieces.expected, "seed " + std::to_string(seed));
        check_equal(fake_cuda_count("kernels"), (count + cuda::kListed - 1) / cuda::kListed);
    }
}

void a_kernel_reaches_no_memory_but_what_is_mapped() {
    const FakeDriver driver;
    Entered entered(*driver.api, 0);
    KernelHandle kernel = 0;
    check_ok(driver.api->load_kernel(kernel));
    Pieces pieces(*driver.api, 8, 100, 1);
    Bytes pageable(100);
    const auto range = driver.api->mapped(pieces.pinned.data() + 7);
    check(range.data() == pieces.pinned.data() && range.size() == pieces.pinned.bytes().size());
    check(driver.api->mapped(pieces.pinned.data() - 1).empty());
    check(driver.api->mapped(range.data() + range.size()).empty());
    check(driver.api->mapped(pageable.data()).empty());
    pieces.copies[3] = {.to = pageable.data(), .from = pieces.device.data(), .nbytes = 100};
    check_ok(driver.api->copy_by_kernel(kernel, pieces.copies, entered.stream()));
    check_equal(fake_cuda_synchronize_all(60), 700);  // and so would a real one
    fake_cuda_poison(0);
}

/// An engine that saves a stream of many pieces, and checks the file.
struct Scene {
    explicit Scene(std::uint64_t max_piece = 2000) : layout(kMiB, 2, max_piece, 8) {}

    void open() {
        engine = std::make_unique<Engine>(kCache, ThreadCounts{}, posix_file_ops(), driver.api);
        for (int device = 0; device < 2; ++device) check_ok(engine->devices().open(device));
        const auto deadline = in(60);
        while (!engine->devices().prepared()) {
            check(Clock::now() < deadline, "devices are never prepared");
            std::this_thread::yield();
        }
        kernels = fake_cuda_count("kernels");
    }
    void check_saves() {
        const Image image = random_image(layout, 1);
        const Training training(2);
        training.write(tensors, image);
        tensors.write_host(image);
        check_durable(*engine->save({tensors.save_file(directory.file("f"))}, {}, 0, open_window(),
                                    training.fences(*engine)));
        check(read_file(directory.file("f")) == reference_file(stream_of(layout, image)));
        kernels = fake_cuda_count("kernels") - kernels;
    }
    [[nodiscard]] bool has_kernel() const { return engine->devices().find(0)->has_kernel(); }

    TemporaryDirectory directory;
    FakeDriver driver;
    Layout layout;
    Tensors tensors{layout};
    std::unique_ptr<Engine> engine;
    std::uint64_t kernels = 0;
};

void small_pieces_are_copied_by_the_kernel() {
    Scene scene;
    scene.open();
    check_ok(scene.engine->devices().kernel_fault());
    check(scene.has_kernel());
    scene.check_saves();
    check(scene.kernels > 0);
    check_equal(fake_cuda_count("copies"), 0U);
    scene.engine.reset();
    check_nothing_left();
}

void large_pieces_are_not() {
    Scene scene(kMiB / 2);
    scene.open();
    scene.check_saves();
    check(fake_cuda_count("copies") > 0);
    const auto is_large = [](const Layout::Piece& piece) {
        return piece.place != kHost && piece.rows == 1 && piece.width > kSmallCopy;
    };
    check(std::ranges::any_of(scene.layout.pieces, is_large));
}

void check_does_without(Scene& scene) {
    scene.open();
    check(!scene.has_kernel());
    scene.check_saves();
    check_equal(scene.kernels, 0U);
    check(fake_cuda_count("copies") > 0);
    scene.engine.reset();
    check_nothing_left();
}

void a_kernel_that_copies_wrongly_is_not_used() {
    Scene scene;
    fake_cuda_spoil_kernels(1);
    check_does_without(scene);
    scene.open();
    check(describe(*scene.engine->devices().kernel_fault()).find("wrong bytes") !=
          std::string::npos);
}

void a_driver_without_what_it_takes_does_without() {
    for (const char* const symbol : {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"}) {
        Scene scene;
        fake_cuda_hide(symbol);
        check_ok(open_cuda(FAKE_CUDA_LIBRARY, scene.driver.api));
        check_does_without(scene);
        scene.open();
        check_error(scene.engine->devices().kernel_fault(), 801);
    }
}

void a_driver_that_refuses_the_kernel_does_without() {
    const std::map<const char*, int> refusals{
        {"cuModuleLoadData", 218}, {"cuModuleGetFunction", 500}, {"cuLaunchKernel", 701}};
    for (const auto& [symbol, error] : refusals) {
        Scene scene;
        for (int device = 0; device < 2; ++device) {
            check_equal(fake_cuda_fail_next(symbol, error, 0), 0);
        }
        check_does_without(scene);
    }
}

void memory_that_kernels_find_elsewhere_is_copied_without_them() {
    Scene scene;
    for (int n = 0; n < 16; ++n) fake_cuda_fail_next("cuMemHostGetDevicePointer_v2", 1, 0);
    check_does_without(scene);
}

void whoever_wants_no_kernel_gets_none() {
    check_equal(::setenv("DCP_DATASTATES_COPY_KERNEL", "0", 1), 0);
    Scene scene;
    check_does_without(scene);
    check_equal(::unsetenv("DCP_DATASTATES_COPY_KERNEL"), 0);
    check_equal(fake_cuda_count("cuModuleLoadData"), 0U);
}

void a_trial_that_never_ends_keeps_its_memory() {
    const FakeDriver driver;
    {
        const auto start = Clock::now();
        Engine engine(kCache, {}, posix_file_ops(), driver.api, std::chrono::milliseconds(100));
        const Stall stall;
        check_ok(engine.devices().open(0));
        while (fake_cuda_count("cuLaunchKernel") == 0) std::this_thread::yield();
        engine.shutdown();
        check(Clock::now() - start < std::chrono::seconds(30), "it waits for a device that hangs");
        check_equal(fake_cuda_count("early_unregistrations"), 0U);
    }
    check_equal(fake_cuda_synchronize_all(60), 0);  // the kernel finds its memory
    check_equal(fake_cuda_count("violations"), 0U);
}

}  // namespace
}  // namespace datastates::testing

int main(int argc, char** argv) {
    using namespace datastates::testing;
    if (argc == 2 && std::string(argv[1]) == "--ptx") {  // for an assembler
        std::fputs(datastates::cuda::kKernelPtx, stdout);
        return 0;
    }
    return run_cases({
        {"pieces_of_all_sizes_and_alignments_are_copied",
         pieces_of_all_sizes_and_alignments_are_copied},
        {"a_kernel_reaches_no_memory_but_what_is_mapped",
         a_kernel_reaches_no_memory_but_what_is_mapped},
        {"small_pieces_are_copied_by_the_kernel", small_pieces_are_copied_by_the_kernel},
        {"large_pieces_are_not", large_pieces_are_not},
        {"a_kernel_that_copies_wrongly_is_not_used", a_kernel_that_copies_wrongly_is_not_used},
        {"a_driver_without_what_it_takes_does_without",
         a_driver_without_what_it_takes_does_without},
        {"a_driver_that_refuses_the_kernel_does_without",
         a_driver_that_refuses_the_kernel_does_without},
        {"memory_that_kernels_find_elsewhere_is_copied_without_them",
         memory_that_kernels_find_elsewhere_is_copied_without_them},
        {"whoever_wants_no_kernel_gets_none", whoever_wants_no_kernel_gets_none},
        {"a_trial_that_never_ends_keeps_its_memory", a_trial_that_never_ends_keeps_its_memory},
    });
}
