#include "ptx.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace datastates::fake_cuda {
namespace {

/// Where a kernel's parameter is, as its own addresses have it: no other memory is there.
constexpr std::uint64_t kParameters = 0;

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) {
        text.remove_prefix(1);
    }
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) {
        text.remove_suffix(1);
    }
    return text;
}

/// Up to `end`, which is taken as well; all if it is not there.
std::string_view take(std::string_view& text, std::string_view end) {
    const auto found = text.find(end);
    const std::string_view taken = text.substr(0, found);
    text.remove_prefix(found == std::string_view::npos ? text.size() : found + end.size());
    return trimmed(taken);
}

[[noreturn]] void refuse(const std::string& what, std::string_view found) {
    throw std::invalid_argument(what + ": '" + std::string(found) + "'");
}

std::uint64_t number(std::string_view text) {
    const bool is_hex = text.starts_with("0x");
    std::string_view digits = text;
    if (is_hex) digits.remove_prefix(2);
    std::uint64_t value = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), value, is_hex ? 16 : 10);
    if (error != std::errc() || end != digits.data() + digits.size()) {
        refuse("not a number", text);
    }
    return value;
}

}  // namespace

enum class Kernel::Op : std::uint8_t {
    kMove32,
    kMove64,
    kMultiplyAddWide,
    kMultiplyAdd,
    kMultiply,
    kOr64,
    kAnd32,
    kShiftLeft32,
    kAdd32,
    kAdd64,
    kNarrow,
    kWiden,
    kToGlobal,
    kIsEqual,
    kIsAtLeast,
    kJump,
    kLoadParameter,
    kLoad,
    kStore,
    kReturn,
};

class Kernel::Parser {
  public:
    Kernel parse(std::string_view ptx, std::string_view name) {
        const auto found = ptx.find(".entry " + std::string(name) + "(");
        if (found == std::string_view::npos) refuse("no such kernel", name);
        for (std::string_view head = ptx.substr(0, found); !head.empty();) {
            read_directive(take(head, "\n"));
        }
        std::string_view text = ptx.substr(found);
        take(text, "(");
        read_parameter(take(text, ")"));
        take(text, "{");
        for (std::string_view body = take(text, "\n}"); !body.empty();) read(take(body, "\n"));
        for (auto& [instruction, label] : jumps_) {
            const auto to = labels_.find(label);
            if (to == labels_.end()) refuse("no such label", label);
            kernel_.code_[instruction].target = to->second;
        }
        kernel_.registers_ = registers_.size();
        return std::move(kernel_);
    }

  private:
    static void read_directive(std::string_view line) {
        constexpr std::array<std::string_view, 6> kKnown{
            ".version 6.0", ".target sm_50", ".address_size 64", ".visible", "", "//"};
        for (const std::string_view known : kKnown) {
            if (line == known || (known == "//" && line.starts_with(known))) return;
        }
        refuse("unknown directive", line);
    }

    void read_parameter(std::string_view text) {
        // .param .align 8 .b8 NAME[NBYTES]
        if (take(text, ".b8 ") != ".param .align 8") refuse("unknown parameter", text);
        const std::string name(take(text, "["));
        kernel_.parameter_nbytes_ = number(take(text, "]"));
        constants_.emplace(name, kParameters);
    }

    void read(std::string_view line) {
        line = trimmed(line.substr(0, line.find("//")));
        if (line.empty()) return;
        if (line.ends_with(':')) {
            labels_.emplace(line.substr(0, line.size() - 1), kernel_.code_.size());
            return;
        }
        if (!line.ends_with(';')) refuse("no semicolon", line);
        line.remove_suffix(1);
        if (line.starts_with(".reg ")) {
            read_registers(line.substr(5));
        } else {
            read_instruction(line);
        }
    }

    void read_registers(std::string_view line) {
        take(line, " ");  // their type
        while (!line.empty()) registers_.emplace(take(line, ","), registers_.size());
    }

    void read_instruction(std::string_view line) {
        Instruction made;
        if (line.front() == '@') {
            made.if_true = register_of(take(line, " ").substr(1));
            line = trimmed(line);
        }
        const std::string_view name = take(line, " ");
        line = trimmed(line);
        read_name(name, made);
        if (made.op == Op::kJump) {
            jumps_.emplace_back(kernel_.code_.size(), std::string(line));
        } else {
            while (!line.empty()) read_operand(line, made);
        }
        kernel_.code_.push_back(std::move(made));
    }

    static void read_name(std::string_view name, Instruction& made) {
        struct Named {
            std::string_view name;
            Op op;
            std::uint32_t nbytes = 0;
        };
        static constexpr std::array<Named, 26> kNames{{
            {"mov.u32", Op::kMove32},
            {"mov.b64", Op::kMove64},
            {"mad.wide.u32", Op::kMultiplyAddWide},
            {"mad.lo.u32", Op::kMultiplyAdd},
            {"mul.lo.u32", Op::kMultiply},
            {"or.b64", Op::kOr64},
            {"and.b32", Op::kAnd32},
            {"shl.b32", Op::kShiftLeft32},
            {"add.u32", Op::kAdd32},
            {"add.u64", Op::kAdd64},
            {"cvt.u32.u64", Op::kNarrow},
            {"cvt.u64.u32", Op::kWiden},
            {"cvta.to.global.u64", Op::kToGlobal},
            {"setp.eq.u32", Op::kIsEqual},
            {"setp.ge.u32", Op::kIsAtLeast},
            {"bra", Op::kJump},
            {"ld.param.u64", Op::kLoadParameter, 8},
            {"ld.param.u32", Op::kLoadParameter, 4},
            {"ld.global.v4.u32", Op::kLoad, 4},
            {"ld.global.u32", Op::kLoad, 4},
            {"ld.global.u16", Op::kLoad, 2},
            {"ld.global.u8", Op::kLoad, 1},
            {"st.global.v4.u32", Op::kStore, 4},
            {"st.global.u32", Op::kStore, 4},
            {"st.global.u16", Op::kStore, 2},
            {"st.global.u8", Op::kStore, 1},
        }};
        if (name == "ret") {
            made.op = Op::kReturn;
            return;
        }
        for (const Named& each : kNames) {
            if (each.name != name) continue;
            made.op = each.op;
            made.nbytes = each.nbytes;
            return;
        }
        refuse("unknown instruction", name);
    }

    /// One of a list; those in braces follow each other. An address becomes a register and a
    /// number.
    void read_operand(std::string_view& line, Instruction& made) {
        if (line.front() == '{') {
            line.remove_prefix(1);
            std::string_view several = take(line, "}");
            while (!several.empty()) made.operands.push_back(operand(take(several, ",")));
            take(line, ",");
        } else if (line.front() == '[') {
            line.remove_prefix(1);
            std::string_view address = take(line, "]");
            take(line, ",");
            made.operands.push_back(operand(take(address, "+")));
            made.operands.push_back(
                {.is_register = false, .value = address.empty() ? 0 : number(trimmed(address))});
        } else {
            made.operands.push_back(operand(take(line, ",")));
        }
        line = trimmed(line);
    }

    Operand operand(std::string_view text) {
        if (text.front() == '%') return {.is_register = true, .value = register_of(text)};
        if (const auto found = constants_.find(text); found != constants_.end()) {
            return {.is_register = false, .value = found->second};
        }
        return {.is_register = false, .value = number(text)};
    }

    [[nodiscard]] std::size_t register_of(std::string_view name) const {
        const auto found = registers_.find(name);
        if (found == registers_.end()) refuse("unknown register", name);
        return found->second;
    }

    Kernel kernel_;
    // The special registers come first, in the order in which `run` sets them.
    std::map<std::string, std::size_t, std::less<>> registers_{
        {"%tid.x", 0}, {"%ntid.x", 1}, {"%ctaid.x", 2}, {"%ctaid.y", 3}, {"%nctaid.y", 4}};
    std::map<std::string, std::uint64_t, std::less<>> constants_;
    std::map<std::string, std::size_t, std::less<>> labels_;
    std::vector<std::pair<std::size_t, std::string>> jumps_;
};

class Kernel::Thread {
  public:
    Thread(const Kernel& kernel, std::span<const std::byte> parameters, const Access& access)
        : kernel_(kernel),
          parameters_(parameters),
          access_(access),
          registers_(kernel.registers_) {}

    bool run(std::span<const std::uint64_t> special) {
        std::ranges::fill(registers_, 0);
        std::ranges::copy(special, registers_.begin());
        for (std::size_t at = 0;;) {
            const Instruction& next = kernel_.code_[at++];
            if (next.if_true && registers_[*next.if_true] == 0) continue;
            if (next.op == Op::kReturn) return true;
            if (next.op == Op::kJump) {
                at = next.target;
            } else if (!perform(next)) {
                return false;
            }
        }
    }

  private:
    bool perform(const Instruction& next) {
        const auto in = [&](std::size_t n) { return value(next.operands[n]); };
        const auto in32 = [&](std::size_t n) { return static_cast<std::uint32_t>(in(n)); };
        std::uint64_t& out = registers_[next.operands[0].value];
        switch (next.op) {
            case Op::kMove32:
            case Op::kNarrow:
            case Op::kWiden:
                out = in32(1);
                return true;
            case Op::kMove64:
            case Op::kToGlobal:
                out = in(1);
                return true;
            case Op::kMultiplyAddWide:
                out = std::uint64_t{in32(1)} * in32(2) + in(3);
                return true;
            case Op::kMultiplyAdd:
                out = in32(1) * in32(2) + in32(3);
                return true;
            case Op::kMultiply:
                out = in32(1) * in32(2);
                return true;
            case Op::kOr64:
                out = in(1) | in(2);
                return true;
            case Op::kAnd32:
                out = in32(1) & in32(2);
                return true;
            case Op::kShiftLeft32:
                out = in32(1) << in32(2);
                return true;
            case Op::kAdd32:
                out = in32(1) + in32(2);
                return true;
            case Op::kAdd64:
                out = in(1) + in(2);
                return true;
            case Op::kIsEqual:
                out = in32(1) == in32(2) ? 1 : 0;
                return true;
            case Op::kIsAtLeast:
                out = in32(1) >= in32(2) ? 1 : 0;
                return true;
            case Op::kLoadParameter:
                return load_parameter(in(1) + in(2) - kParameters, next.nbytes, out);
            case Op::kLoad:
                return load(next);
            case Op::kStore:
                return store(next);
            case Op::kJump:
            case Op::kReturn:
                break;
        }
        return false;
    }

    [[nodiscard]] std::uint64_t value(const Operand& operand) const {
        return operand.is_register ? registers_[operand.value] : operand.value;
    }

    bool load_parameter(std::uint64_t at, std::uint32_t nbytes, std::uint64_t& out) const {
        if (nbytes == 0 || at % nbytes != 0 || at + nbytes > parameters_.size()) return false;
        out = 0;
        std::memcpy(&out, parameters_.data() + at, nbytes);
        return true;
    }

    bool load(const Instruction& next) {
        const std::size_t count = next.operands.size() - 2;
        const std::uint64_t address = value(next.operands[count]) + value(next.operands[count + 1]);
        const auto nbytes = static_cast<std::uint32_t>(count * next.nbytes);
        std::array<std::byte, 16> bytes{};
        if (nbytes == 0 || address % nbytes != 0 || !access_.load(address, bytes.data(), nbytes)) {
            return false;
        }
        for (std::size_t n = 0; n < count; ++n) {
            std::uint64_t& out = registers_[next.operands[n].value];
            out = 0;
            std::memcpy(&out, bytes.data() + n * next.nbytes, next.nbytes);
        }
        return true;
    }

    bool store(const Instruction& next) {
        const std::size_t count = next.operands.size() - 2;
        const std::uint64_t address = value(next.operands[0]) + value(next.operands[1]);
        const auto nbytes = static_cast<std::uint32_t>(count * next.nbytes);
        std::array<std::byte, 16> bytes{};
        for (std::size_t n = 0; n < count; ++n) {
            const std::uint64_t each = value(next.operands[n + 2]);
            std::memcpy(bytes.data() + n * next.nbytes, &each, next.nbytes);
        }
        return nbytes != 0 && address % nbytes == 0 && access_.store(address, bytes.data(), nbytes);
    }

    const Kernel& kernel_;
    const std::span<const std::byte> parameters_;
    const Access& access_;
    std::vector<std::uint64_t> registers_;
};

std::optional<Kernel> Kernel::parse(std::string_view ptx, std::string_view name, std::string& why) {
    try {
        return Parser().parse(ptx, name);
    } catch (const std::invalid_argument& error) {
        why = error.what();
        return std::nullopt;
    }
}

bool Kernel::run(Extent grid, Extent block, Extent place, std::span<const std::byte> parameters,
                 const Access& access) const {
    Thread thread(*this, parameters, access);
    for (std::uint32_t x = 0; x < block.x; ++x) {
        const std::array<std::uint64_t, 5> special{x, block.x, place.x, place.y, grid.y};
        if (!thread.run(special)) return false;
    }
    return true;
}

}  // namespace datastates::fake_cuda
