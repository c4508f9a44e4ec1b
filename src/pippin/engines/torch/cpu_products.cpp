// Sums of matrix products, such as x W^T + z B^T + residual; compiled for the machine it runs on.
//
// A unit is four bytes along the inner dimension: one float, or two bfloat16. The right matrix is
// packed stripe by stripe, a row of units for each step of the inner dimension. The left one stays
// where it is: each of its units meets such a row. Sums stay in registers through all terms.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "cpu_numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

typedef uint32_t Unit __attribute__((aligned(2), may_alias));
typedef uint32_t Units __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int TALL = 8, WIDE = 3;  // rows and registers of a tile: 24 sums, 3 of b, 1 of a

// a (rows, depth) times b (depth, columns); `turned`: b lies as (columns, depth).
struct Term {
    const char *a, *b;
    int64_t a_row, b_row, depth, turned;
};

// out = scale * sum of terms + plus, rows and columns by the steps given; `plus` may be null.
struct Call {
    char *out, *plus;
    int64_t out_row, out_column, exact, plus_row, rows, columns, count;
    Term terms[1];
};

template <class T>
constexpr int PER_UNIT = 4 / sizeof(T);

inline void add(Lanes& sum, float, uint32_t a, Units b) {
    sum += std::bit_cast<float>(a) * (Lanes)b;
}
inline void add(Lanes& sum, bf16, uint32_t a, Units b) {
#ifdef __AVX512BF16__
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Units{} + a), (__m512bh)b);
#else
    sum += std::bit_cast<float>(a << 16) * (Lanes)(b << 16);
    sum += std::bit_cast<float>(a & 0xffff0000u) * (Lanes)(b & 0xffff0000u);
#endif
}

inline uint32_t unit(const float* first, int64_t) { return std::bit_cast<uint32_t>(*first); }
inline uint32_t unit(const bf16* first, int64_t step) {
    return uint32_t(first[0]) | uint32_t(first[step]) << 16;
}

// One of four steps that turn a block: bit STEP of row and lane change places.
template <int STEP>
[[gnu::always_inline]] inline void swap(Units* rows) {
    Units low, high;
    for (int l = 0; l < LANES; ++l) {
        low[l] = l & STEP ? LANES + l - STEP : l;
        high[l] = l & STEP ? LANES + l : l + STEP;
    }
    for (int r = 0; r < LANES; ++r) {
        if (r & STEP) continue;
        Units a = rows[r], b = rows[r + STEP];
        rows[r] = __builtin_shuffle(a, b, low);
        rows[r + STEP] = __builtin_shuffle(a, b, high);
    }
}

// LANES rows of as many units, turned.
inline void turn(const char* from, int64_t row_bytes, uint32_t* to, int to_row) {
    Units rows[LANES];
    for (int r = 0; r < LANES; ++r) rows[r] = *(const Units*)(from + r * row_bytes);
    swap<1>(rows);
    swap<2>(rows);
    swap<4>(rows);
    swap<8>(rows);
    for (int r = 0; r < LANES; ++r) *(Units*)(to + size_t(r) * to_row) = rows[r];
}

// `columns` of b from `first` on, zeros up to `width`.
template <class T>
void pack(const Term& term, int64_t first, int columns, int width, uint32_t* to) {
    const T* b = (const T*)term.b + first * (term.turned ? term.b_row : 1);
    int64_t units = term.depth / PER_UNIT<T>, step = term.turned ? 1 : term.b_row;
    int64_t across = term.turned ? term.b_row : 1;
    int whole = term.turned ? columns / LANES * LANES : 0;
    int64_t blocks = whole ? units / LANES * LANES : 0;
    for (int c = 0; c < whole; c += LANES)
        for (int64_t u = 0; u < blocks; u += LANES)
            turn((const char*)(b + c * across) + 4 * u, across * sizeof(T), to + u * width + c,
                 width);
    for (int64_t u = 0; u < units; ++u) {
        const T* from = b + u * PER_UNIT<T> * step;
        uint32_t* row = to + u * width;
        if (!term.turned) {  // what the next stripe reads is on its way meanwhile
            for (int n = 0; n < PER_UNIT<T>; ++n)
                for (int c = 0; c < width; c += LANES)
                    __builtin_prefetch(from + n * step + width + c);
            for (int c = 0; c < columns; ++c) row[c] = unit(from + c, step);
        } else {
            for (int c = u < blocks ? whole : 0; c < columns; ++c)
                row[c] = unit(from + c * across, step);
        }
        for (int c = columns; c < width; ++c) row[c] = 0;
    }
}

template <class T, int HIGH, int WIDTH>
void multiply(const Call& call, int64_t row, const uint32_t* packed, Lanes* out) {
    Lanes sums[HIGH][WIDTH] = {};
    for (int64_t t = 0; t < call.count; ++t) {
        const Term& term = call.terms[t];
        const T* a = (const T*)term.a + row * term.a_row;
        for (int64_t k = 0; k < term.depth; k += PER_UNIT<T>) {
            Units b[WIDTH];
            for (int w = 0; w < WIDTH; ++w) b[w] = *(const Units*)(packed + w * LANES);
            packed += WIDTH * LANES;
            for (int r = 0; r < HIGH; ++r)
                for (int w = 0; w < WIDTH; ++w)
                    add(sums[r][w], T(), *(const Unit*)(a + r * term.a_row + k), b[w]);
        }
    }
    for (int r = 0; r < HIGH; ++r)
        for (int w = 0; w < WIDTH; ++w) out[r * WIDTH + w] = sums[r][w];
}

template <class T, class Out>
void write(const Call& call, int64_t row, int64_t column, int high, int columns, Lanes* sums,
           int width, float scale) {
    for (int r = 0; r < high; ++r) {
        float* from = (float*)sums + r * width;
        if (call.plus) {
            const T* beside = (const T*)call.plus + (row + r) * call.plus_row + column;
#pragma omp simd
            for (int c = 0; c < columns; ++c) from[c] = scale * from[c] + get(beside[c]);
        } else {
#pragma omp simd
            for (int c = 0; c < width; ++c) from[c] *= scale;
        }
        Out* to = (Out*)call.out + (row + r) * call.out_row + column * call.out_column;
        if (call.out_column != 1)
            for (int c = 0; c < columns; ++c) put(to[c * call.out_column], from[c]);
        else
#pragma omp simd
            for (int c = 0; c < columns; ++c) put(to[c], from[c]);
    }
}

// Rows `from` to `to` of a stripe of WIDTH registers.
template <class T, int WIDTH>
void stripe(const Call& call, int64_t column, int64_t from, int64_t to, float scale) {
    static thread_local std::vector<uint32_t> packed;
    constexpr int width = WIDTH * LANES;
    int columns = std::min<int64_t>(width, call.columns - column);
    size_t size = 0;
    for (int64_t t = 0; t < call.count; ++t) {
        size_t units = call.terms[t].depth / PER_UNIT<T>;
        if (packed.size() < size + units * width) packed.resize(size + units * width);
        pack<T>(call.terms[t], column, columns, width, packed.data() + size);
        size += units * width;
    }
    Lanes sums[TALL * WIDTH];
    int64_t rows = to - from, tiles = (rows + TALL - 1) / TALL;
    for (int64_t t = 0; t < tiles; ++t) {  // of nearly the same height
        int64_t row = from + rows * t / tiles;
        int high = from + rows * (t + 1) / tiles - row;
        using Tile = void (*)(const Call&, int64_t, const uint32_t*, Lanes*);
        static constexpr Tile by_height[] = {
            multiply<T, 1, WIDTH>, multiply<T, 2, WIDTH>, multiply<T, 3, WIDTH>,
            multiply<T, 4, WIDTH>, multiply<T, 5, WIDTH>, multiply<T, 6, WIDTH>,
            multiply<T, 7, WIDTH>, multiply<T, 8, WIDTH>};
        by_height[high - 1](call, row, packed.data(), sums);
        auto put_down = call.exact ? write<T, float> : write<T, T>;
        put_down(call, row, column, high, columns, sums, width, scale);
    }
}

template <class T>
void products(const Call& call, float scale) {
    int64_t full = WIDE * LANES, wide = call.columns / full;
    int64_t stripes = wide + (call.columns - wide * full + LANES - 1) / LANES;
    int64_t parts = std::max<int64_t>(1, omp_get_max_threads() / stripes);
#pragma omp parallel for schedule(dynamic)
    for (int64_t job = 0; job < stripes * parts; ++job) {
        int64_t s = job / parts, part = job % parts;
        int64_t from = call.rows * part / parts, to = call.rows * (part + 1) / parts;
        if (s < wide)
            stripe<T, WIDE>(call, s * full, from, to, scale);
        else
            stripe<T, 1>(call, wide * full + (s - wide) * LANES, from, to, scale);
    }
}

}  // namespace

extern "C" {
void products_f(const Call* call, float scale) { products<float>(*call, scale); }
void products_h(const Call* call, float scale) { products<bf16>(*call, scale); }
}
