// Several products whose work items are shared out together, and how much of a matrix one item is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t kFewRows = 32;   // up to which reading a matrix is the limit, or nearly
constexpr int64_t kStretches = 2;  // of a matrix for each thread

// The panels of a work item. panel_work: multiply-adds of one. item_work: with less, threads get into each other's way.
//
// With few rows an item is a long stretch of the matrix: the processor fetches ahead within it by itself, and waits where
// the next one begins. With many rows small items share the work out more evenly.
inline int64_t panels_of_item(int64_t panels, int64_t panel_work, int64_t item_work, int64_t rows, int num_threads) {
  const int64_t least = std::max<int64_t>(1, item_work / std::max<int64_t>(1, panel_work));
  const int64_t stretches = kStretches * num_threads;
  return rows > kFewRows ? least : std::max(least, (panels + stretches - 1) / stretches);
}

// Products, each with `items()` and `work()`, whose items are numbered one after the other.
template <class Product>
class Batch {
 public:
  struct Found {
    const Product& product;
    int64_t item;  // of the product
  };

  explicit Batch(int64_t most) {
    products_.reserve(size_t(most));
    ends_.reserve(size_t(most));
  }

  void add(const Product& product) {
    products_.push_back(product);
    ends_.push_back(items() + product.items());
    work_ += product.work();
  }

  int64_t items() const { return ends_.empty() ? 0 : ends_.back(); }
  int64_t work() const { return work_; }
  const Product& operator[](int64_t i) const { return products_[size_t(i)]; }

  Found find(int64_t item) const {
    const size_t i = size_t(std::upper_bound(ends_.begin(), ends_.end(), item) - ends_.begin());
    return {products_[i], i ? item - ends_[i - 1] : item};
  }

 private:
  std::vector<Product> products_;
  std::vector<int64_t> ends_;  // the number of items up to and with each product
  int64_t work_ = 0;
};

}  // namespace
