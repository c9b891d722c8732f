// Runs kernels given as PTX: the few instructions that this project's kernel is made of, one thread
// after the other. What it does not know is refused when it is parsed.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace datastates::fake_cuda {

/// Sizes of a grid, or of a block; or a place in one.
struct Extent {
    std::uint32_t x = 1;
    std::uint32_t y = 1;
};

class Kernel {
  public:
    /// The kernel `name` of a module. Nothing, if the module has none, or something else that is
    /// not known here; `why` says which.
    static std::optional<Kernel> parse(std::string_view ptx, std::string_view name,
                                       std::string& why);

    /// How threads get at memory: each access is `nbytes` at an address that it is a multiple of.
    struct Access {
        std::function<bool(std::uint64_t address, std::byte* to, std::uint32_t nbytes)> load;
        std::function<bool(std::uint64_t address, const std::byte* from, std::uint32_t nbytes)>
            store;
    };

    [[nodiscard]] std::size_t parameter_nbytes() const { return parameter_nbytes_; }

    /// Runs all threads of one block. False after an access that failed or was not aligned.
    [[nodiscard]] bool run(Extent grid, Extent block, Extent place,
                           std::span<const std::byte> parameters, const Access& access) const;

  private:
    enum class Op : std::uint8_t;
    struct Operand {
        bool is_register = false;
        std::uint64_t value = 0;  ///< or number of the register
    };
    struct Instruction {
        Op op{};
        std::uint32_t nbytes = 0;            ///< of each element that is loaded or stored
        std::optional<std::size_t> if_true;  ///< a predicate
        std::vector<Operand> operands;       ///< as written; of an address, the register, offset
        std::size_t target = 0;              ///< of a jump
    };
    class Parser;
    class Thread;

    std::vector<Instruction> code_;
    std::size_t registers_ = 0;
    std::size_t parameter_nbytes_ = 0;
};

}  // namespace datastates::fake_cuda
