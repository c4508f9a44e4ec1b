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
typedef bf16 Halves __attribute__((vector_size(32), aligned(2), may_alias));
constexpr int TALL = 8, WIDE = 3;  // rows and registers of a tile: 24 sums, 3 of b, 1 of a
constexpr int64_t DEEPEST = 2048;  // units of a packed stripe: less than half of a second cache

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

// From numbers `step` apart: one unit, and those of LANES columns.
inline uint32_t unit(const float* first, int64_t) { return std::bit_cast<uint32_t>(*first); }
inline uint32_t unit(const bf16* first, int64_t step) {
    return uint32_t(first[0]) | uint32_t(first[step]) << 16;
}
inline Units units(const float* first, int64_t) { return *(const Units*)first; }
inline Units units(const bf16* first, int64_t step) {
    Units low = __builtin_convertvector(*(const Halves*)first, Units);
    return low | __builtin_convertvector(*(const Halves*)(first + step), Units) << 16;
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

// LANES rows of as many units, turned; those of the next stripe are called from memory.
inline void turn(const char* from, int64_t row_bytes, uint32_t* to, int to_row) {
    Units rows[LANES];
    for (int r = 0; r < LANES; ++r) rows[r] = *(const Units*)(from + r * row_bytes);
    for (int r = 0; r < LANES; ++r) __builtin_prefetch(from + (r + WIDE * LANES) * row_bytes, 0, 2);
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
    int64_t units_deep = term.depth / PER_UNIT<T>;
    int64_t step = term.turned ? 1 : term.b_row, across = term.turned ? term.b_row : 1;
    int whole = columns / LANES * LANES;
    int64_t blocks = term.turned && whole ? units_deep / LANES * LANES : 0;
    for (int c = 0; c < whole; c += LANES)
        for (int64_t u = 0; u < blocks; u += LANES)
            turn((const char*)(b + c * across) + 4 * u, across * sizeof(T), to + u * width + c,
                 width);
    for (int64_t u = 0; u < units_deep; ++u) {
        const T* from = b + u * PER_UNIT<T> * step;
        uint32_t* row = to + u * width;
        int done = u < blocks ? whole : 0;
        if (!term.turned)
            for (; done < whole; done += LANES) {
                *(Units*)(row + done) = units(from + done, step);
                for (int n = 0; n < PER_UNIT<T>; ++n)
                    __builtin_prefetch(from + n * step + done + width, 0, 2);
            }
        for (; done < columns; ++done) row[done] = unit(from + done * across, step);
        for (; done < width; ++done) row[done] = 0;
    }
}

// A tile's sums; `more` adds to what they are.
template <class T, int HIGH, int WIDTH>
void multiply(const Term* first, const Term* last, int64_t row, const uint32_t* packed,
              Lanes* out, bool more) {
    Lanes sums[HIGH][WIDTH] = {};
    for (const Term* term = first; term < last; ++term) {
        const T* a = (const T*)term->a + row * term->a_row;
        for (int64_t k = 0; k < term->depth; k += PER_UNIT<T>) {
            Units b[WIDTH];
            for (int w = 0; w < WIDTH; ++w) b[w] = *(const Units*)(packed + w * LANES);
            packed += WIDTH * LANES;
            for (int r = 0; r < HIGH; ++r)
                for (int w = 0; w < WIDTH; ++w)
                    add(sums[r][w], T(), *(const Unit*)(a + r * term->a_row + k), b[w]);
        }
    }
    for (int r = 0; r < HIGH; ++r)
        for (int w = 0; w < WIDTH; ++w) {
            Lanes* to = out + r * WIDTH + w;
            *to = more ? *to + sums[r][w] : sums[r][w];
        }
}

// Rows `first` to `last` of a stripe, from their sums.
template <class T, class Out, int WIDTH>
void write(const Call& call, int64_t column, int columns, int64_t first, int64_t last,
           const float* sums, float scale) {
    for (int64_t row = first; row < last; ++row, sums += WIDTH * LANES) {
        const T* plus = (const T*)call.plus + row * call.plus_row + column;
        Out* to = (Out*)call.out + row * call.out_row + column * call.out_column;
        auto each = [&](int count, int64_t step, auto beside) {
#pragma omp simd
            for (int c = 0; c < count; ++c) put(to[c * step], scale * sums[c] + beside(c));
        };
        auto all = [&](auto beside) {
            if (call.out_column == 1 && columns == WIDTH * LANES)
                each(WIDTH * LANES, 1, beside);
            else
                each(columns, call.out_column, beside);
        };
        if (call.plus)
            all([&](int c) { return get(plus[c]); });
        else
            all([](int) { return 0.0f; });
    }
}

// Memory that a thread keeps.
template <class V>
V* room(size_t size) {
    static thread_local std::vector<V> kept;
    if (kept.size() < size) kept.resize(size);
    return kept.data();
}

// Rows `from` to `to` of a stripe of WIDTH registers.
template <class T, int WIDTH>
void stripe(const Call& call, const std::vector<Term>& terms, int64_t column, int64_t from,
            int64_t to, float scale) {
    constexpr int width = WIDTH * LANES;
    int columns = std::min<int64_t>(width, call.columns - column);
    int64_t rows = to - from, tiles = (rows + TALL - 1) / TALL;
    uint32_t* packed = room<uint32_t>(DEEPEST * width);
    Lanes* sums = (Lanes*)room<float>(rows * width);
    const Term *first = terms.data(), *end = first + terms.size();
    while (first < end) {
        const Term* last = first;
        int64_t units = 0;
        for (; last < end && units + last->depth / PER_UNIT<T> <= DEEPEST; ++last) {
            pack<T>(*last, column, columns, width, packed + units * width);
            units += last->depth / PER_UNIT<T>;
        }
        for (int64_t t = 0; t < tiles; ++t) {  // of nearly the same height
            int64_t row = rows * t / tiles, high = rows * (t + 1) / tiles - row;
            static constexpr decltype(&multiply<T, 1, WIDTH>) by_height[] = {
                multiply<T, 1, WIDTH>, multiply<T, 2, WIDTH>, multiply<T, 3, WIDTH>,
                multiply<T, 4, WIDTH>, multiply<T, 5, WIDTH>, multiply<T, 6, WIDTH>,
                multiply<T, 7, WIDTH>, multiply<T, 8, WIDTH>};
            Lanes* tile = sums + row * WIDTH;
            by_height[high - 1](first, last, from + row, packed, tile, first > terms.data());
        }
        first = last;
    }
    auto put_down = call.exact ? write<T, float, WIDTH> : write<T, T, WIDTH>;
    put_down(call, column, columns, from, to, (const float*)sums, scale);
}

// Terms none of which is deeper than a packed stripe may be.
template <class T>
std::vector<Term> cut(const Call& call) {
    std::vector<Term> terms;
    for (int64_t t = 0; t < call.count; ++t) {
        Term term = call.terms[t];
        int64_t deepest = DEEPEST * PER_UNIT<T>, left = term.depth;
        for (; left > 0; left -= deepest) {
            term.depth = std::min(left, deepest);
            terms.push_back(term);
            term.a += deepest * sizeof(T);
            term.b += deepest * (term.turned ? 1 : term.b_row) * sizeof(T);
        }
    }
    return terms;
}

template <class T>
void products(const Call& call, float scale) {
    std::vector<Term> terms = cut<T>(call);
    int64_t full = WIDE * LANES, wide = call.columns / full;
    int64_t stripes = wide + (call.columns - wide * full + LANES - 1) / LANES;
    int64_t parts = std::max<int64_t>(1, omp_get_max_threads() / stripes);
#pragma omp parallel for schedule(dynamic)
    for (int64_t job = 0; job < stripes * parts; ++job) {
        int64_t s = job / parts, part = job % parts;
        int64_t from = call.rows * part / parts, to = call.rows * (part + 1) / parts;
        if (s < wide)
            stripe<T, WIDE>(call, terms, s * full, from, to, scale);
        else
            stripe<T, 1>(call, terms, wide * full + (s - wide) * LANES, from, to, scale);
    }
}

}  // namespace

extern "C" {
void products_f(const Call* call, float scale) { products<float>(*call, scale); }
void products_h(const Call* call, float scale) { products<bf16>(*call, scale); }
}
