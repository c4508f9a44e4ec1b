// Passes over weights that share scales; compiled for the machine it runs on.
//
// Every function goes through `groups` groups of `size` weights, a multiple of LANES, one after the
// other. What it finds is to the last bit what numpy finds: sums of a group run over LANES partial
// sums, whose halves are then added until one is left.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };
constexpr int LANES = 32;

inline float get(float x) { return x; }
inline float get(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float get(half x) {  // 2^112 brings half's exponent to float's
    float size = std::bit_cast<float>(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(size) | uint32_t(x.bits & 0x8000) << 16);
}

inline float add(float a, float b) { return a + b; }
inline float less(float a, float b) { return a < b ? a : b; }
inline float more(float a, float b) { return a > b ? a : b; }

// One of LANES numbers, made of all of them.
template <float (*join)(float, float), int WIDTH = LANES / 2>
inline float folded(float* lanes) {
    for (int j = 0; j < WIDTH; ++j) lanes[j] = join(lanes[j], lanes[j + WIDTH]);
    if constexpr (WIDTH > 1) return folded<join, WIDTH / 2>(lanes);
    return lanes[0];
}

// The nearest whole number from `least` to `most`.
inline float whole(float x, float least, float most) {
    return less(more(__builtin_rintf(x), least), most);
}

template <class T>
void extremes(const T* weights, float* low, float* high, int64_t groups, int size) {
    for (int64_t group = 0; group < groups; ++group, weights += size) {
        float least[LANES], most[LANES];
        for (int j = 0; j < LANES; ++j) least[j] = most[j] = get(weights[j]);
        for (int i = LANES; i < size; i += LANES)
            for (int j = 0; j < LANES; ++j) {
                float x = get(weights[i + j]);
                least[j] = less(x, least[j]);
                most[j] = more(x, most[j]);
            }
        low[group] = folded<less>(least);
        high[group] = folded<more>(most);
    }
}

template <class T>
void nearest(const T* weights, const float* scales, const float* biases, uint8_t* codes,
             int64_t groups, int size, float most) {
    for (int64_t group = 0; group < groups; ++group, weights += size, codes += size) {
        float scale = scales[group], bias = biases[group];
        for (int i = 0; i < size; ++i)
            codes[i] = uint8_t(int(whole((get(weights[i]) - bias) / scale, 0, most)));
    }
}

// Squared error of codes from -half to half - 1 times a scale.
template <class T>
float clipped(const T* weights, float scale, int size, float half) {
    float sums[LANES] = {};
    for (int i = 0; i < size; i += LANES)
        for (int j = 0; j < LANES; ++j) {
            float scaled = get(weights[i + j]) / scale, away = scaled - whole(scaled, -half, half - 1);
            sums[j] += away * away;
        }
    return folded<add>(sums) * (scale * scale);
}

template <class T>
void finer(const T* weights, const float* fine, const float* wide, bool* found, int64_t groups,
           int size, float half) {
    for (int64_t group = 0; group < groups; ++group, weights += size)
        found[group] = fine[group] != wide[group] && clipped(weights, fine[group], size, half) <
                                                         clipped(weights, wide[group], size, half);
}

// sums: of the errors' squares, of the weights' squares, and the largest error.
template <class T>
void errors(const T* weights, const uint8_t* codes, const float* scales, const float* biases,
            double* sums, int64_t groups, int size) {
    for (int64_t first = 0; first < groups; first += 64) {
        float noise[LANES] = {}, signal[LANES] = {}, largest[LANES] = {};
        int64_t end = first + 64 < groups ? first + 64 : groups;
        for (int64_t group = first; group < end; ++group, weights += size, codes += size) {
            float scale = scales[group], bias = biases[group];
            for (int i = 0; i < size; i += LANES)
                for (int j = 0; j < LANES; ++j) {
                    float x = get(weights[i + j]), away = float(codes[i + j]) * scale + bias - x;
                    noise[j] += away * away;
                    signal[j] += x * x;
                    largest[j] = more(std::fabs(away), largest[j]);
                }
        }
        sums[0] += folded<add>(noise);
        sums[1] += folded<add>(signal);
        sums[2] = more(folded<more>(largest), float(sums[2]));
    }
}

// Eight codes of eight bits become BITS bytes; neighbours move together.
template <int BITS>
void pack(const uint8_t* codes, uint8_t* packed, int64_t count) {
    for (int64_t i = 0; i < count; i += 8, packed += BITS) {
        uint64_t word;
        std::memcpy(&word, codes + i, 8);
        word = (word & 0x00ff00ff00ff00ff) | (word >> 8 & 0x00ff00ff00ff00ff) << BITS;
        word = (word & 0x0000ffff0000ffff) | (word >> 16 & 0x0000ffff0000ffff) << 2 * BITS;
        word = (word & 0x00000000ffffffff) | (word >> 32) << 4 * BITS;
        std::memcpy(packed, &word, BITS);
    }
}

}  // namespace

#define OF(T)                                                                                      \
    void extremes_##T(const T* weights, float* low, float* high, int64_t groups, int size) {       \
        extremes(weights, low, high, groups, size);                                                \
    }                                                                                              \
    void nearest_##T(const T* weights, const float* scales, const float* biases, uint8_t* codes,   \
                     int64_t groups, int size, float most) {                                       \
        nearest(weights, scales, biases, codes, groups, size, most);                               \
    }                                                                                              \
    void finer_##T(const T* weights, const float* fine, const float* wide, bool* found,            \
                   int64_t groups, int size, float half) {                                        \
        finer(weights, fine, wide, found, groups, size, half);                                     \
    }                                                                                              \
    void errors_##T(const T* weights, const uint8_t* codes, const float* scales,                   \
                    const float* biases, double* sums, int64_t groups, int size) {                 \
        errors(weights, codes, scales, biases, sums, groups, size);                                \
    }

extern "C" {
OF(float)
OF(bf16)
OF(half)
void pack_2(const uint8_t* codes, uint8_t* packed, int64_t count) { pack<2>(codes, packed, count); }
void pack_3(const uint8_t* codes, uint8_t* packed, int64_t count) { pack<3>(codes, packed, count); }
void pack_4(const uint8_t* codes, uint8_t* packed, int64_t count) { pack<4>(codes, packed, count); }
void pack_5(const uint8_t* codes, uint8_t* packed, int64_t count) { pack<5>(codes, packed, count); }
void pack_6(const uint8_t* codes, uint8_t* packed, int64_t count) { pack<6>(codes, packed, count); }
}
