// CRC-32 as zip and gzip have it: of slabs, which are checked when they are first read.
#pragma once

#include <cstdint>

namespace moeflow {

uint32_t crc32(const uint8_t* bytes, int64_t count);

}  // namespace moeflow
