// A queue whose entries can be made ahead, where memory may run out.

#pragma once

#include <cstddef>
#include <list>
#include <utility>

namespace datastates {

/// First in, first out. What takes or gives a Node, or a whole queue, allocates nothing and cannot
/// fail. Not for several threads at once.
template <typename T>
class NodeQueue {
  public:
    /// An entry that is in no queue, or none.
    class Node {
      public:
        Node() = default;
        explicit Node(T value) { entry_.push_back(std::move(value)); }

        explicit operator bool() const { return !entry_.empty(); }
        [[nodiscard]] T* operator->() { return &entry_.front(); }

      private:
        friend NodeQueue;

        std::list<T> entry_;
    };

    NodeQueue() = default;
    /// Of so many entries, each a T().
    explicit NodeQueue(std::size_t entries) : entries_(entries) {}

    [[nodiscard]] bool empty() const { return entries_.empty(); }
    [[nodiscard]] T& front() { return entries_.front(); }

    void push_back(T value) { entries_.push_back(std::move(value)); }
    void push_back(Node node) noexcept { entries_.splice(entries_.end(), node.entry_); }
    void push_front(Node node) noexcept { entries_.splice(entries_.begin(), node.entry_); }

    // Of a queue that is not empty.
    [[nodiscard]] T pop_front() {
        T first = std::move(entries_.front());
        entries_.pop_front();
        return first;
    }
    [[nodiscard]] Node take_front() noexcept {
        Node node;
        node.entry_.splice(node.entry_.end(), entries_, entries_.begin());
        return node;
    }

    /// Those of which `condition`, which does not throw, is true.
    template <typename Condition>
    [[nodiscard]] NodeQueue take_if(const Condition& condition) noexcept {
        NodeQueue taken;
        for (auto next = entries_.begin(); next != entries_.end();) {
            const auto entry = next++;
            if (condition(*entry)) taken.entries_.splice(taken.entries_.end(), entries_, entry);
        }
        return taken;
    }

  private:
    std::list<T> entries_;
};

}  // namespace datastates
