// Numbers as they lie in memory, float or bfloat16, and as registers hold them, float.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace {

typedef uint16_t bf16;

inline float get(float x) { return x; }
inline float get(bf16 x) { return std::bit_cast<float>(uint32_t(x) << 16); }
inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) {  // to the nearest, ties to even
    uint32_t bits = std::bit_cast<uint32_t>(x);
    to = bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class T>
float rounded(float x) {
    T narrow;
    put(narrow, x);
    return get(narrow);
}

// e^x from 2^-126 to 2^127: Taylor's terms of 2^part for parts of a half at most.
inline float power(float x) {
    float scaled = std::min(std::max(x * 1.44269504f, -126.0f), 127.0f);
    float whole = __builtin_rintf(scaled), part = scaled - whole;
    float value = 1.5403530e-4f;
    value = value * part + 1.3333558e-3f;
    value = value * part + 9.6181291e-3f;
    value = value * part + 5.5504109e-2f;
    value = value * part + 2.4022651e-1f;
    value = value * part + 6.9314718e-1f;
    value = value * part + 1.0f;
    return value * std::bit_cast<float>((int32_t(whole) + 127) << 23);
}

// A register's worth, wherever it lies.
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int LANES = 16;

}  // namespace
