// Causal attention inside samples that lie one after another, in float, forward and backward.

#pragma once

#include <algorithm>
#include <vector>

#include "cpu_numbers.h"

namespace {

constexpr int TALL = 8, BLOCK = 16;

inline int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

// What a thread's matrices lie in, the latest one last: the next job takes it up again.
thread_local std::vector<std::vector<float>> places;
thread_local size_t taken = 0;

inline float* take(size_t size) {
    if (places.size() == taken) places.emplace_back();
    std::vector<float>& place = places[taken++];
    if (place.size() < size) place.resize(size);
    return place.data();
}

// A float matrix in rows of whole lanes, its numbers anything at first.
struct Matrix {
    int rows, row;
    float* values;
    Matrix(int rows, int columns)
        : rows(rows), row(columns), values(take(size_t(rows) * columns)) {}
    Matrix(const Matrix&) = delete;
    ~Matrix() { --taken; }
    float* at(int r) { return values + size_t(r) * row; }
    void clear() { std::fill(at(0), at(rows), 0.0f); }
    // Zeros where `from` has none.
    template <class T>
    void fill(const T* from, size_t stride, int filled, int columns, float scale = 1) {
        for (int r = 0; r < filled; ++r) {
            for (int c = 0; c < columns; ++c) at(r)[c] = scale * get(from[r * stride + c]);
            std::fill(at(r) + columns, at(r + 1), 0.0f);
        }
        std::fill(at(filled), at(rows), 0.0f);
    }
    void turn(Matrix& from) {
        for (int r = 0; r < from.rows; ++r)
            for (int c = 0; c < from.row; ++c) at(c)[r] = from.at(r)[c];
    }
    template <class T>
    void write(T* to, size_t stride, int filled, int columns, float scale = 1) {
        for (int r = 0; r < filled; ++r)
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
    Matrix key, value, key_turned, weights;
    template <class T>
    Sample(const Call& call, int job, const T* k, const T* v)
        : start(call.bounds[job / call.kv_heads]),
          length(int(call.bounds[job / call.kv_heads + 1]) - start),
          rows(padded(length)), wide(padded(call.channels)),
          key(rows, wide), value(rows, wide), key_turned(wide, rows), weights(BLOCK, rows) {
        size_t stride = call.kv_heads * call.channels;
        size_t at = start * stride + job % call.kv_heads * call.channels;
        key.fill(k + at, stride, length, call.channels);
        value.fill(v + at, stride, length, call.channels);
        key_turned.turn(key);
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
        Matrix value_turned(s.wide, s.rows);
        value_turned.turn(s.value);
        d_key.clear();
        d_value.clear();
        for (int j = 0; j < call.group(); ++j) {
            size_t at = s.start * stride + (job % call.kv_heads * call.group() + j) * call.channels;
            query.fill(q + at, stride, s.length, call.channels, call.scale);
            out.fill(grad + at, stride, s.length, call.channels);
            for (int first = 0; first < s.rows; first += BLOCK) {
                int count = std::min(BLOCK, s.rows - first), seen = first + count;
                s.weigh(query, first, count, call.window);
                product(d_weights.at(0), s.rows, out.at(first), s.wide, 1, value_turned.at(0),
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

}  // namespace
