// What lies between a decoder layer's products on a CPU; compiled for the machine it runs on.
//
// Numbers are float or bfloat16 in memory and float in registers. Rows are contiguous.
// T tokens, D hidden, H query heads, K kv heads, C head channels, V vocabulary.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

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

inline float chance(float x) { return 1.0f / (1.0f + power(-x)); }

template <class T>
float rate_of(const T* x, int width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; ++i) sum += get(x[i]) * get(x[i]);
    return 1.0f / std::sqrt(sum / width + eps);
}

template <class T>
void norm_rows(const T* x, const T* weight, T* out, int rows, int width, float eps) {
#pragma omp parallel for
    for (int row = 0; row < rows; ++row) {
        const T* from = x + size_t(row) * width;
        T* to = out + size_t(row) * width;
        float rate = rate_of(from, width, eps);
#pragma omp simd
        for (int i = 0; i < width; ++i) put(to[i], rounded<T>(get(from[i]) * rate) * get(weight[i]));
    }
}

template <class T>
void norm_grad_rows(const T* grad, const T* x, const T* weight, const T* beside, T* out, int rows,
                    int width, float eps) {
#pragma omp parallel for
    for (int row = 0; row < rows; ++row) {
        size_t at = size_t(row) * width;
        float rate = rate_of(x + at, width, eps), sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < width; ++i)
            sum += get(grad[at + i]) * get(weight[i]) * get(x[at + i]);
        float share = sum * rate * rate / width;
#pragma omp simd
        for (int i = 0; i < width; ++i) {
            float inner = get(grad[at + i]) * get(weight[i]) - get(x[at + i]) * share;
            put(out[at + i], inner * rate + get(beside[at + i]));
        }
    }
}

template <class T>
void gate_all(const T* gate, const T* up, T* out, int64_t count) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < count; ++i) {
        float g = get(gate[i]);
        put(out[i], g * chance(g) * get(up[i]));
    }
}

// `d_up` may stand where `grad` does.
template <class T>
void gate_grad_all(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up, int64_t count) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < count; ++i) {
        float d = get(grad[i]), g = get(gate[i]), share = chance(g), silu = g * share;
        put(d_gate[i], d * get(up[i]) * (share + silu * (1.0f - share)));
        put(d_up[i], d * silu);
    }
}

// Turns the first `width` channels of every head; the angles of both halves are the same.
template <class T>
void rotate_rows(T* x, const T* cosines, const T* sines, int rows, int heads, int channels,
                 int width, float sign) {
#pragma omp parallel for
    for (int row = 0; row < rows; ++row) {
        const T *c = cosines + size_t(row) * width, *s = sines + size_t(row) * width;
        for (int head = 0; head < heads; ++head) {
            T* first = x + (size_t(row) * heads + head) * channels;
            T* second = first + width / 2;
#pragma omp simd
            for (int i = 0; i < width / 2; ++i) {
                float a = get(first[i]), b = get(second[i]), turn = sign * get(s[i]);
                put(first[i], a * get(c[i]) - b * turn);
                put(second[i], b * get(c[i]) + a * turn);
            }
        }
    }
}

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int LANES = 16, TALL = 8, BLOCK = 16;

inline int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

// A float matrix in rows of whole lanes, padded with zeros.
struct Matrix {
    int row;
    std::vector<float> values;
    Matrix(int rows, int columns) : row(columns), values(size_t(rows) * columns) {}
    float* at(int r) { return values.data() + size_t(r) * row; }
    template <class T>
    void fill(const T* from, size_t stride, int rows, int columns, float scale = 1) {
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) at(r)[c] = scale * get(from[r * stride + c]);
    }
    void turn(Matrix& from, int rows) {
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < from.row; ++c) at(c)[r] = from.at(r)[c];
    }
    template <class T>
    void write(T* to, size_t stride, int rows, int columns, float scale = 1) {
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) put(to[r * stride + c], scale * at(r)[c]);
    }
};

// out (m, n) = or += a (m, k) b (k, n); m in multiples of TALL, n of LANES; `a` by any steps.
void product(float* out, int out_row, const float* a, size_t a_row, size_t a_step, const float* b,
             int b_row, int m, int k, int n, bool add) {
    for (int j = 0; j < n; j += LANES)
        for (int i = 0; i < m; i += TALL) {
            Lanes sums[TALL] = {};
            const float* left = a + i * a_row;
            for (int p = 0; p < k; ++p) {
                Lanes right = *(const Lanes*)(b + size_t(p) * b_row + j);
                for (int r = 0; r < TALL; ++r) sums[r] += left[r * a_row + p * a_step] * right;
            }
            for (int r = 0; r < TALL; ++r) {
                Lanes* to = (Lanes*)(out + size_t(i + r) * out_row + j);
                *to = add ? *to + sums[r] : sums[r];
            }
        }
}

// Scores of queries `start` and after become weights of the keys that they see.
void softmax(Matrix& scores, int start, int rows, int window) {
    for (int r = 0; r < rows; ++r) {
        float* row = scores.at(r);
        int query = start + r, from = std::max(0, query - window + 1);
        float top = row[query], sum = 0;
#pragma omp simd reduction(max : top)
        for (int j = from; j <= query; ++j) top = std::max(top, row[j]);
#pragma omp simd reduction(+ : sum)
        for (int j = from; j <= query; ++j) sum += row[j] = power(row[j] - top);
        float share = 1 / sum;
        std::fill(row, row + from, 0.0f);
        for (int j = from; j <= query; ++j) row[j] *= share;
        std::fill(row + query + 1, row + scores.row, 0.0f);
    }
}

// Attention's call: where samples begin and end, and how queries see keys.
struct Call {
    const int64_t* bounds;
    int samples, heads, kv_heads, channels, window;
    float scale;
    int group() const { return heads / kv_heads; }
    int jobs() const { return samples * kv_heads; }
};

// Keys and values of one kv head over one sample, as they are and turned.
struct Sample {
    int start, length, rows, wide;
    Matrix key, value, key_turned, value_turned, weights;
    template <class T>
    Sample(const Call& call, int job, const T* k, const T* v)
        : start(call.bounds[job / call.kv_heads]),
          length(int(call.bounds[job / call.kv_heads + 1]) - start),
          rows(padded(length)), wide(padded(call.channels)),
          key(rows, wide), value(rows, wide), key_turned(wide, rows), value_turned(wide, rows),
          weights(BLOCK, rows) {
        size_t stride = call.kv_heads * call.channels;
        size_t at = start * stride + job % call.kv_heads * call.channels;
        key.fill(k + at, stride, length, call.channels);
        value.fill(v + at, stride, length, call.channels);
        key_turned.turn(key, length);
        value_turned.turn(value, length);
    }
    // Weights of `count` queries from `first` on; keys behind the last of them are not met.
    void weigh(Matrix& query, int first, int count, int window) {
        int seen = first + count;
        product(weights.at(0), rows, query.at(first), wide, 1, key_turned.at(0), rows, count, wide,
                seen, false);
        softmax(weights, first, count, window);
    }
};

template <class T>
void attend_all(const Call& call, const T* q, const T* k, const T* v, T* out) {
    size_t stride = call.heads * call.channels;
#pragma omp parallel for schedule(dynamic)
    for (int job = 0; job < call.jobs(); ++job) {
        Sample s(call, job, k, v);
        Matrix query(s.rows, s.wide), mixed(s.rows, s.wide);
        for (int j = 0; j < call.group(); ++j) {
            size_t at = s.start * stride + (job % call.kv_heads * call.group() + j) * call.channels;
            query.fill(q + at, stride, s.length, call.channels, call.scale);
            for (int first = 0; first < s.rows; first += BLOCK) {
                int count = std::min(BLOCK, s.rows - first), seen = first + count;
                s.weigh(query, first, count, call.window);
                product(mixed.at(first), s.wide, s.weights.at(0), s.rows, 1, s.value.at(0), s.wide,
                        count, seen, s.wide, false);
            }
            mixed.write(out + at, stride, s.length, call.channels);
        }
    }
}

// d_weights become the scores' gradients.
void softmax_grad(Matrix& weights, Matrix& d_weights, int rows, int seen) {
    for (int r = 0; r < rows; ++r) {
        float *p = weights.at(r), *d = d_weights.at(r), sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < seen; ++j) sum += p[j] * d[j];
        for (int j = 0; j < seen; ++j) d[j] = p[j] * (d[j] - sum);
    }
}

template <class T>
void attend_grad_all(const Call& call, const T* grad, const T* q, const T* k, const T* v, T* d_q,
                     T* d_k, T* d_v) {
    size_t stride = call.heads * call.channels, kv_stride = call.kv_heads * call.channels;
#pragma omp parallel for schedule(dynamic)
    for (int job = 0; job < call.jobs(); ++job) {
        Sample s(call, job, k, v);
        Matrix query(s.rows, s.wide), out(s.rows, s.wide), d_query(s.rows, s.wide);
        Matrix d_key(s.rows, s.wide), d_value(s.rows, s.wide), d_weights(BLOCK, s.rows);
        for (int j = 0; j < call.group(); ++j) {
            size_t at = s.start * stride + (job % call.kv_heads * call.group() + j) * call.channels;
            query.fill(q + at, stride, s.length, call.channels, call.scale);
            out.fill(grad + at, stride, s.length, call.channels);
            for (int first = 0; first < s.rows; first += BLOCK) {
                int count = std::min(BLOCK, s.rows - first), seen = first + count;
                s.weigh(query, first, count, call.window);
                product(d_weights.at(0), s.rows, out.at(first), s.wide, 1, s.value_turned.at(0),
                        s.rows, count, s.wide, seen, false);
                product(d_value.at(0), s.wide, s.weights.at(0), 1, s.rows, out.at(first), s.wide,
                        seen, count, s.wide, true);
                softmax_grad(s.weights, d_weights, count, seen);
                product(d_query.at(first), s.wide, d_weights.at(0), s.rows, 1, s.key.at(0), s.wide,
                        count, seen, s.wide, false);
                product(d_key.at(0), s.wide, d_weights.at(0), 1, s.rows, query.at(first), s.wide,
                        seen, count, s.wide, true);
            }
            d_query.write(d_q + at, stride, s.length, call.channels, call.scale);
        }
        size_t at = s.start * kv_stride + job % call.kv_heads * call.channels;
        d_key.write(d_k + at, kv_stride, s.length, call.channels);
        d_value.write(d_v + at, kv_stride, s.length, call.channels);
    }
}

// Cross-entropy by row of logits = scale * products; where `wanted` they become its gradient.
template <class T>
void loss_rows(T* products, const int64_t* targets, float* losses, int rows, int words,
               float scale, bool wanted) {
#pragma omp parallel for
    for (int row = 0; row < rows; ++row) {
        T* x = products + size_t(row) * words;
        float top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
        for (int i = 0; i < words; ++i) top = std::max(top, get(x[i]) * scale);
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < words; ++i) sum += power(get(x[i]) * scale - top);
        float target = get(x[targets[row]]) * scale, share = scale / sum;
        losses[row] = std::log(sum) + top - target;
        if (!wanted) continue;
#pragma omp simd
        for (int i = 0; i < words; ++i) put(x[i], power(get(x[i]) * scale - top) * share);
        put(x[targets[row]], power(target - top) * share - scale);
    }
}

}  // namespace

// Every function twice: _f of float, _h of bfloat16.
#define BOTH(T, TAIL)                                                                             \
    void norm##TAIL(const T* x, const T* weight, T* out, int rows, int width, float eps) {        \
        norm_rows(x, weight, out, rows, width, eps);                                              \
    }                                                                                             \
    void norm_grad##TAIL(const T* grad, const T* x, const T* weight, const T* beside, T* out,     \
                         int rows, int width, float eps) {                                        \
        norm_grad_rows(grad, x, weight, beside, out, rows, width, eps);                           \
    }                                                                                             \
    void gate##TAIL(const T* gate, const T* up, T* out, int64_t count) {                          \
        gate_all(gate, up, out, count);                                                           \
    }                                                                                             \
    void gate_grad##TAIL(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up,           \
                         int64_t count) {                                                         \
        gate_grad_all(grad, gate, up, d_gate, d_up, count);                                       \
    }                                                                                             \
    void rotate##TAIL(T* x, const T* cosines, const T* sines, int rows, int heads, int channels,  \
                      int width, float sign) {                                                    \
        rotate_rows(x, cosines, sines, rows, heads, channels, width, sign);                       \
    }                                                                                             \
    void attend##TAIL(const Call* call, const T* q, const T* k, const T* v, T* out) {             \
        attend_all(*call, q, k, v, out);                                                          \
    }                                                                                             \
    void attend_grad##TAIL(const Call* call, const T* grad, const T* q, const T* k, const T* v,   \
                           T* d_q, T* d_k, T* d_v) {                                              \
        attend_grad_all(*call, grad, q, k, v, d_q, d_k, d_v);                                     \
    }                                                                                             \
    void loss##TAIL(T* products, const int64_t* targets, float* losses, int rows, int words,      \
                    float scale, bool wanted) {                                                   \
        loss_rows(products, targets, losses, rows, words, scale, wanted);                         \
    }

extern "C" {
BOTH(float, _f)
BOTH(bf16, _h)
}
