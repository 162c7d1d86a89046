// Packing of a quantised weight.
#pragma once

#include <algorithm>

#include "quantised_panel.h"

namespace {

// A weight [n, k] as a checkpoint holds it; see kernels/data/integers.py.
struct QuantisedWeight {
  const uint8_t* codes;  // [n, k], of 4 bits [n, k / 2], rows contiguous
  const char* scales;    // [n, groups]
  const char* offsets;   // like scales
  int64_t n, k;

  void pack_panel(const PanelLayout& layout, int64_t p, char* to) const {
    const int64_t first = p * kPanel, columns = std::min(kPanel, n - first);
    std::memset(to, 0, size_t(layout.bytes()));
    for (int64_t g = 0; g < layout.groups; ++g, to += layout.group_bytes()) {
      const int64_t begin = g * layout.group, end = std::min(begin + layout.group, k);
      if (layout.bits == 8)
        pack_bytes(first, columns, begin, end, to);
      else if (layout.bits == 6)
        pack_six(first, columns, begin, end, to);
      else
        pack_nibbles(first, columns, begin, end, to);
      char* after = to + layout.code_bytes();
      pack_scales(scales, layout, first, columns, g, after);
      if (layout.offsets) pack_scales(offsets, layout, first, columns, g, after + layout.scale_bytes());
    }
  }

 private:
  void pack_bytes(int64_t first, int64_t columns, int64_t begin, int64_t end, char* to) const {
    for (int64_t column = 0; column < columns; ++column) {
      const uint8_t* const row = codes + (first + column) * k;
      for (int64_t i = begin; i < end; i += 4) {
        char* const at = to + (i - begin) * kPanel + 4 * column;
        if (end - i >= 4)
          std::memcpy(at, row + i, 4);
        else
          std::memcpy(at, row + i, size_t(end - i));
      }
    }
  }

  void pack_six(int64_t first, int64_t columns, int64_t begin, int64_t end, char* to) const {
    for (int64_t column = 0; column < columns; ++column) {
      const uint8_t* const row = codes + (first + column) * k;
      for (int64_t i = begin; i < end; i += 16) {
        uint32_t fours[4] = {};
        std::memcpy(fours, row + i, size_t(std::min<int64_t>(16, end - i)));
        for (int j = 0; j < 3; ++j) {
          const uint32_t packed = fours[j] | (fours[3] >> 2 * j & 0x03030303) << 6;
          std::memcpy(to + ((i - begin) / 16 * 3 + j) * 4 * kPanel + 4 * column, &packed, sizeof(packed));
        }
      }
    }
  }

  void pack_nibbles(int64_t first, int64_t columns, int64_t begin, int64_t end, char* to) const {
    for (int64_t column = 0; column < columns; ++column) {
      const uint8_t* const row = codes + (first + column) * k / 2;
      for (int64_t i = begin; i < end; i += 8) {
        uint32_t pairs = 0;  // the even column of k in the low half of each byte
        if (end - i >= 8)
          std::memcpy(&pairs, row + i / 2, 4);
        else
          std::memcpy(&pairs, row + i / 2, size_t(end - i + 1) / 2);
        const uint32_t even = pairs & 0x0f0f0f0f, odd = pairs >> 4 & 0x0f0f0f0f;
        const uint32_t e = even | even >> 12, o = odd | odd >> 12;  // columns 0 and 4, and 2 and 6, meet in a byte
        const uint32_t packed = (e & 0xff) | (o & 0xff) << 8 | (e >> 8 & 0xff) << 16 | (o >> 8 & 0xff) << 24;
        std::memcpy(to + (i - begin) / 2 * kPanel + 4 * column, &packed, sizeof(packed));
      }
    }
  }

  void pack_scales(const char* from, const PanelLayout& layout, int64_t first, int64_t columns, int64_t g,
                   char* to) const {
    const int64_t size = layout.scale_size();
    for (int64_t column = 0; column < columns; ++column)
      std::memcpy(to + column * size, from + ((first + column) * layout.groups + g) * size, size_t(size));
  }
};

}  // namespace
