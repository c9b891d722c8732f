// An abstract interpreter of the pickle machine (opcodes: Python's Lib/pickletools.py). Values are
// small tags; what a tag must remember is what a later opcode may be refused for.

#include "pickle_scan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "pickle_opcodes.h"
#include "tuple_collisions.h"

namespace datastates {
namespace {

enum class Kind : std::uint8_t {
    kAtom,  // None, float, bytes, bytearray, frozenset, an integer of more than 8 bytes
    kInt,   // of up to 8 bytes; True and False too, which hash and count as such
    kText,
    kTuple,
    kGlobal,    // what a name stands for: a class, a function, any object
    kReduced,   // what a call with an argument returned: perhaps an object of the process
    kMapping,   // what a call without arguments returned: an OrderedDict, made here
    kInstance,  // of a class, made here
    kList,
    kDict,
    kSet,
};

// Flags of a value.
constexpr std::uint8_t kKey = 1;        // may be a key: hashing it is cheap
constexpr std::uint8_t kKeyPart = 2;    // may be in a tuple that is a key
constexpr std::uint8_t kInts = 4;       // a tuple of up to 64 integers
constexpr std::uint8_t kArguments = 8;  // a tuple that anything may be called with
constexpr std::uint8_t kState =
    16;  // a tuple that __setstate__ may get; one of two would set slots
constexpr std::uint8_t kEmpty = 32;  // the empty tuple

struct Value {
    Kind kind = Kind::kAtom;
    std::uint8_t flags = 0;
    std::uint8_t depth = 0;
    bool fresh = false;  // a container where it was made, not a reference to it
    /// Values in it, counted as often as they are in it; of a fresh one, the container's number.
    std::uint32_t weight = 1;
};
static_assert(sizeof(Value) == 8);  // the memo holds millions

struct Slot : Value {
    std::uint64_t integer = 0;  // its value, if it is one
};

/// What can still change while it lies on the stack where it was made.
struct Container {
    std::uint32_t weight = 1;
    std::uint8_t depth = 1;
    bool open = true;      // until it is put into another or referred to
    bool built = false;    // its attributes were set
    bool keyable = false;  // of an instance: all attributes may be hashed; of a dict: all values
};

constexpr std::uint64_t kMaxIntegers = 64;  // torch allows as many dimensions
constexpr unsigned kMaxCollisions = 16;
constexpr std::uint32_t kMaxKeyWeight = 256;
constexpr std::uint64_t kMaxStateTuple = 16;

class Scanner {
  public:
    explicit Scanner(std::span<const std::byte> pickle) : data_(pickle) {
        // Address space for what DCP's metadata need; copying vectors as they grow costs a third.
        memo_.reserve(pickle.size() / 16);
        containers_.reserve(pickle.size() / 32);
    }

    std::optional<std::string> run() {
        if (!prologue()) return std::move(reason_);
        while (!stopped_) {
            start_ = at_;
            if (at_ == data_.size()) {
                (void)refuse("ends without STOP");
                return std::move(reason_);
            }
            const Op op{std::to_integer<std::uint8_t>(data_[at_++])};
            if (!step(op)) return std::move(reason_);
        }
        if (at_ != data_.size()) {
            (void)refuse("goes on behind STOP");
        } else if (collisions_.count() > kMaxCollisions) {
            (void)refuse("has tuples made to collide in Python's hash");
        }
        return std::move(reason_);
    }

  private:
    [[gnu::cold, gnu::noinline]] bool refuse(std::string_view why) {
        reason_ = "the pickle " + std::string(why) + " (at byte " + std::to_string(start_) + ")";
        return false;
    }

    bool prologue() {
        if (data_.size() < 2 || Op{std::to_integer<std::uint8_t>(data_[0])} != Op::kProto) {
            return refuse("does not begin with its protocol");
        }
        const auto protocol = std::to_integer<unsigned>(data_[1]);
        if (protocol < 2 || protocol > 5) return refuse("has a protocol other than 2 to 5");
        at_ = 2;
        return true;
    }

    bool step(Op op) {  // NOLINT(readability-function-size): a table
        std::uint64_t n = 0;
        switch (op) {
            case Op::kStop:
                stopped_ = true;
                if (stack_.size() != 1 || !marks_.empty()) return refuse("leaves values behind");
                return true;
            case Op::kFrame:  // a hint for reading ahead
                return number(8, n) && (n <= left() || refuse("has a frame longer than the data"));
            case Op::kNone:
                return atom(kKey);
            case Op::kNewTrue:
                return integer(1);
            case Op::kNewFalse:
                return integer(0);
            case Op::kBinInt1:
                return number(1, n) && integer(n);
            case Op::kBinInt2:
                return number(2, n) && integer(n);
            case Op::kBinInt:
                return number(4, n) && integer(sign_extended(n, 4));
            case Op::kLong1:
                return long1();
            case Op::kBinFloat:
                return skip(8) && atom(kKey);
            case Op::kShortBinUnicode:
                return number(1, n) && skip(n) && text();
            case Op::kBinUnicode:
                return number(4, n) && skip(n) && text();
            case Op::kBinUnicode8:
                return number(8, n) && skip(n) && text();
            case Op::kShortBinBytes:
                return number(1, n) && skip(n) && atom(kKey | kKeyPart);
            case Op::kBinBytes:
                return number(4, n) && skip(n) && atom(kKey | kKeyPart);
            case Op::kBinBytes8:
                return number(8, n) && skip(n) && atom(kKey | kKeyPart);
            case Op::kByteArray8:
                return number(8, n) && skip(n) && atom(0);
            case Op::kMark:
                marks_.push_back(stack_.size());
                return true;
            case Op::kEmptyTuple:
                return tuple(0);
            case Op::kTuple1:
                return tuple(1);
            case Op::kTuple2:
                return tuple(2);
            case Op::kTuple3:
                return tuple(3);
            case Op::kTuple:
                return to_mark(n) && tuple(n);
            case Op::kEmptyList:
                return container(Kind::kList, false);
            case Op::kEmptyDict:
                return container(Kind::kDict, true);
            case Op::kEmptySet:
                return container(Kind::kSet, false);
            case Op::kAppend:
                return append(1);
            case Op::kAppends:
                return to_mark(n) && append(n);
            case Op::kSetItem:
                return set_items(2);
            case Op::kSetItems:
                return to_mark(n) && set_items(n);
            case Op::kAddItems:
                return to_mark(n) && add_items(n);
            case Op::kFrozenSet:
                return to_mark(n) && frozen_set(n);
            case Op::kGlobal:
                return line() && line() && push({.kind = Kind::kGlobal, .flags = kKey});
            case Op::kStackGlobal:
                return stack_global();
            case Op::kReduce:
                return reduce();
            case Op::kNewObj:
                return new_object();
            case Op::kBuild:
                return build();
            case Op::kMemoize:
                return memoize(memo_.size());
            case Op::kBinPut:
                return number(1, n) && memoize(n);
            case Op::kLongBinPut:
                return number(4, n) && memoize(n);
            case Op::kBinGet:
                return number(1, n) && get(n);
            case Op::kLongBinGet:
                return number(4, n) && get(n);
            case Op::kProto:
                break;
        }
        return refuse("has an opcode that checkpoint metadata never has: " +
                      std::to_string(static_cast<unsigned>(op)));
    }

    // --- the data -------------------------------------------------------------------------------

    [[nodiscard]] std::uint64_t left() const { return data_.size() - at_; }

    bool number(unsigned bytes, std::uint64_t& value) {
        const std::size_t begin = at_;
        if (!skip(bytes)) return false;
        value = 0;
        for (unsigned i = 0; i < bytes; ++i) {
            value |= std::to_integer<std::uint64_t>(data_[begin + i]) << (8 * i);
        }
        return true;
    }

    bool skip(std::uint64_t bytes) {
        if (bytes > left()) return refuse("is cut short, or gives a length beyond its end");
        at_ += bytes;
        return true;
    }

    bool line() {
        const auto rest = data_.subspan(at_);
        const void* const end =
            rest.empty() ? nullptr : std::memchr(rest.data(), '\n', rest.size());
        if (end == nullptr) return refuse("has a name without an end");
        at_ += static_cast<std::size_t>(static_cast<const std::byte*>(end) - rest.data()) + 1;
        return true;
    }

    static std::uint64_t sign_extended(std::uint64_t value, unsigned bytes) {
        if (bytes == 0) return 0;
        const unsigned unused = 64 - (8 * bytes);
        return static_cast<std::uint64_t>(static_cast<std::int64_t>(value << unused) >> unused);
    }

    // --- values ---------------------------------------------------------------------------------

    bool push(const Value& value, std::uint64_t integer = 0) {
        stack_.push_back({value, integer});
        return true;
    }

    bool atom(unsigned flags) { return push({.flags = static_cast<std::uint8_t>(flags)}); }

    bool integer(std::uint64_t value) {
        return push({.kind = Kind::kInt, .flags = kKey | kKeyPart}, value);
    }

    bool text() { return push({.kind = Kind::kText, .flags = kKey | kKeyPart}); }

    bool long1() {
        std::uint64_t bytes = 0;
        std::uint64_t value = 0;
        if (!number(1, bytes)) return false;
        if (bytes > 8) return skip(bytes) && atom(0);
        const auto width = static_cast<unsigned>(bytes);
        return number(width, value) && integer(sign_extended(value, width));
    }

    bool container(Kind kind, bool keyable) {
        if (containers_.size() == std::numeric_limits<std::uint32_t>::max()) {
            return refuse("holds too many containers");
        }
        containers_.push_back({.keyable = keyable});
        const auto number = static_cast<std::uint32_t>(containers_.size() - 1);
        return push({.kind = kind, .fresh = true, .weight = number});
    }

    Container& made_at(const Value& fresh) { return containers_[fresh.weight]; }

    /// Values above the latest mark, or on the whole stack.
    [[nodiscard]] std::size_t available() const {
        return stack_.size() - (marks_.empty() ? 0 : marks_.back());
    }

    bool to_mark(std::uint64_t& count) {
        if (marks_.empty()) return refuse("has no mark where one is needed");
        count = available();
        marks_.pop_back();
        return true;
    }

    bool need(std::uint64_t count) {
        return available() >= count || refuse("takes values that are not there");
    }

    /// The value as it is when it is put into another: what was open in it is closed.
    Value closed(Value value) {
        if (value.fresh) {
            Container& made = made_at(value);
            made.open = false;
            value.fresh = false;
            value.depth = made.depth;
            value.weight = made.weight;
            if (value.kind == Kind::kInstance && made.keyable) value.flags |= kKey;
        }
        return value;
    }

    static bool is_key(const Value& value) {
        return (value.flags & kKey) != 0 && value.weight <= kMaxKeyWeight;
    }

    static std::uint32_t sum(std::uint32_t a, std::uint32_t b) {
        return b > std::numeric_limits<std::uint32_t>::max() - a
                   ? std::numeric_limits<std::uint32_t>::max()
                   : a + b;
    }

    bool deepen(std::uint8_t& depth, std::uint8_t inner) {
        if (inner >= kMaxPickleDepth) {
            return refuse("nests deeper than " + std::to_string(kMaxPickleDepth));
        }
        depth = std::max<std::uint8_t>(depth, inner + 1);
        return true;
    }

    bool tuple(std::uint64_t count) {
        if (!need(count)) return false;
        const std::size_t begin = stack_.size() - count;
        Value made{.kind = Kind::kTuple, .depth = 1};
        bool key = true;
        bool ints = count <= kMaxIntegers;
        for (std::size_t i = begin; i < stack_.size(); ++i) {
            const Value element = closed(stack_[i]);
            if (!deepen(made.depth, element.depth)) return false;
            made.weight = sum(made.weight, element.weight);
            key = key && (element.flags & kKeyPart) != 0;
            ints = ints && element.kind == Kind::kInt;
        }
        if (key) made.flags |= kKey;
        if (ints) made.flags |= kInts;
        if (count == 0) made.flags |= kEmpty;
        if (count == 0 || (count == 1 && is_argument(stack_[begin]))) made.flags |= kArguments;
        if (count != 2 && count <= kMaxStateTuple) made.flags |= kState;
        if (ints && count > 1) {
            collisions_.add(count, [&](std::size_t i) { return stack_[begin + i].integer; });
        }
        stack_.resize(begin);
        return push(made);
    }

    static bool is_argument(const Value& value) {
        return value.kind == Kind::kInt || value.kind == Kind::kText || (value.flags & kInts) != 0;
    }

    // --- filling containers
    // -----------------------------------------------------------------------

    /// The container below `count` values, if it may be filled where it is.
    const Value* target(std::uint64_t count, std::string_view why) {
        if (!need(count + 1)) return nullptr;
        const Value& found = stack_[stack_.size() - count - 1];
        if (!found.fresh || !made_at(found).open) {
            (void)refuse(why);
            return nullptr;
        }
        return &found;
    }

    bool put(Container& into, const Value& value) {
        into.weight = sum(into.weight, value.weight);
        return deepen(into.depth, value.depth);
    }

    bool append(std::uint64_t count) {
        const Value* const list = target(count, "appends to what it did not just make");
        if (list == nullptr) return false;
        if (list->kind != Kind::kList) return refuse("appends to what is no list");
        Container& made = made_at(*list);
        for (std::size_t i = stack_.size() - count; i < stack_.size(); ++i) {
            if (!put(made, closed(stack_[i]))) return false;
        }
        stack_.resize(stack_.size() - count);
        return true;
    }

    bool set_items(std::uint64_t count) {
        const Value* const dict = target(count, "sets items of what it did not just make");
        if (dict == nullptr) return false;
        if (dict->kind != Kind::kDict && dict->kind != Kind::kMapping) {
            return refuse("sets items of what is no dict");
        }
        if (count % 2 != 0) return refuse("sets an item without a value");
        Container& made = made_at(*dict);
        for (std::size_t i = stack_.size() - count; i < stack_.size(); i += 2) {
            const Value key = closed(stack_[i]);
            const Value value = closed(stack_[i + 1]);
            if (!is_key(key)) return refuse("has a key of a kind that metadata never has");
            if (!put(made, key) || !put(made, value)) return false;
            made.keyable = made.keyable && is_key(value);
        }
        stack_.resize(stack_.size() - count);
        return true;
    }

    bool add_items(std::uint64_t count) {
        const Value* const set = target(count, "adds to what it did not just make");
        if (set == nullptr) return false;
        if (set->kind != Kind::kSet) return refuse("adds to what is no set");
        for (std::size_t i = stack_.size() - count; i < stack_.size(); ++i) {
            const Value element = closed(stack_[i]);
            if (!is_key(element)) return refuse("has a key of a kind that metadata never has");
            if (!put(made_at(*set), element)) return false;
        }
        stack_.resize(stack_.size() - count);
        return true;
    }

    bool frozen_set(std::uint64_t count) {
        Value made{.depth = 1};
        for (std::size_t i = stack_.size() - count; i < stack_.size(); ++i) {
            const Value element = closed(stack_[i]);
            if (!is_key(element)) return refuse("has a key of a kind that metadata never has");
            if (!deepen(made.depth, element.depth)) return false;
            made.weight = sum(made.weight, element.weight);
        }
        stack_.resize(stack_.size() - count);
        return push(made);
    }

    // --- names, calls, instances
    // ------------------------------------------------------------------

    Value pop() {
        const Value top = closed(stack_.back());
        stack_.pop_back();
        return top;
    }

    bool stack_global() {
        if (!need(2)) return false;
        const Kind name = pop().kind;
        const Kind module = pop().kind;
        if (name != Kind::kText || module != Kind::kText)
            return refuse("has a name that is no text");
        return push({.kind = Kind::kGlobal, .flags = kKey});
    }

    bool reduce() {
        if (!need(2)) return false;
        const Value arguments = pop();
        if (pop().kind != Kind::kGlobal) return refuse("calls what it made itself");
        if ((arguments.flags & kArguments) == 0) {
            return refuse("calls with arguments that metadata never has");
        }
        if ((arguments.flags & kEmpty) != 0) return container(Kind::kMapping, false);
        Value made{.kind = Kind::kReduced, .flags = kKey, .weight = arguments.weight};
        return deepen(made.depth, arguments.depth) && push(made);
    }

    bool new_object() {
        if (!need(2)) return false;
        const Value arguments = pop();
        if (pop().kind != Kind::kGlobal) return refuse("makes an instance of what is no class");
        if ((arguments.flags & kEmpty) == 0) {
            return refuse("makes an instance with arguments");
        }
        return container(Kind::kInstance, false);
    }

    bool build() {
        const Value* const instance = target(1, "sets attributes of what it did not just make");
        if (instance == nullptr) return false;
        if (instance->kind != Kind::kInstance) {
            return refuse("sets attributes of what is no instance");
        }
        // A dict from the memo could be copied again and again; a tuple of two sets slots.
        const Value& state = stack_.back();
        const bool own_dict = state.kind == Kind::kDict && state.fresh;
        const bool values = (state.flags & kState) != 0;
        if (!own_dict && !values) return refuse("sets attributes from what is no dict of them");
        Container& made = made_at(*instance);
        if (std::exchange(made.built, true)) return refuse("sets attributes a second time");
        if (own_dict) made.keyable = made_at(state).keyable;
        return put(made, pop());
    }

    // --- the memo
    // ---------------------------------------------------------------------------------

    bool memoize(std::uint64_t index) {
        if (index != memo_.size()) return refuse("leaves gaps in its memo");
        if (!need(1)) return false;
        memo_.push_back(stack_.back());
        return true;
    }

    bool get(std::uint64_t index) {
        if (index >= memo_.size()) return refuse("refers to a memo entry that is not there");
        Value& entry = memo_[index];
        entry = closed(entry);  // to fill it from now on could put it into itself
        return push(entry);
    }

    std::span<const std::byte> data_;
    std::size_t start_ = 0;  // of the opcode at hand
    std::size_t at_ = 0;
    bool stopped_ = false;
    std::optional<std::string> reason_;
    std::vector<Slot> stack_;
    std::vector<std::size_t> marks_;
    std::vector<Value> memo_;
    std::vector<Container> containers_;
    TupleCollisions collisions_;
};

}  // namespace

std::optional<std::string> scan_pickle(std::span<const std::byte> pickle) {
    return Scanner(pickle).run();
}

}  // namespace datastates
