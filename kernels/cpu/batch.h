// Several products whose work items are shared out together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

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
