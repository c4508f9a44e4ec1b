// Causal attention inside samples that lie one after another, in float, forward and backward.
// A family is a sample, or a beginning and behind it the rests of the samples that share it.

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
    void clear(int first) { std::fill(at(first), at(rows), 0.0f); }
    // Rows `first` and after; zeros behind them, as far as a block that begins anywhere reaches.
    template <class T>
    void fill(int first, const T* from, size_t stride, int filled, int columns, float scale = 1) {
        for (int r = first; r < first + filled; ++r, from += stride) {
            for (int c = 0; c < columns; ++c) at(r)[c] = scale * get(from[c]);
            std::fill(at(r) + columns, at(r + 1), 0.0f);
        }
        int end = first + filled;
        std::fill(at(end), at(std::min(rows, padded(end) + BLOCK)), 0.0f);
    }
    void turn(int first, Matrix& from) {
        for (int r = first; r < from.rows; ++r)
            for (int c = 0; c < from.row; ++c) at(c)[r] = from.at(r)[c];
    }
    template <class T>
    void write(int first, T* to, size_t stride, int filled, int columns, float scale = 1) {
        for (int r = first; r < first + filled; ++r, to += stride)
            for (int c = 0; c < columns; ++c) put(to[c], scale * at(r)[c]);
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

// Attention's call: where samples begin and end, the first one of each family and the end of the
// last family, and how queries see keys.
struct Call {
    const int64_t *bounds, *firsts;
    int families, heads, kv_heads, channels, window;
    float scale;
    int group() const { return heads / kv_heads; }
    int jobs() const { return families * kv_heads; }
    size_t stride() const { return size_t(heads) * channels; }
    size_t kv_stride() const { return size_t(kv_heads) * channels; }
};

// Where a sample lies, and how many keys come before its own.
struct Span {
    int start, length, before;
    int rows() const { return padded(length); }
};

// One kv head of a family: the spans in it, and matrices for the longest of them.
struct Job {
    const Call& call;
    int64_t first, last;
    int head, shared, rows = 0, wide;
    Job(const Call& call, int job)
        : call(call), first(call.firsts[job / call.kv_heads]),
          last(call.firsts[job / call.kv_heads + 1]), head(job % call.kv_heads),
          shared(int(call.bounds[first + 1] - call.bounds[first])), wide(padded(call.channels)) {
        for (int64_t s = first; s < last; ++s)
            rows = std::max(rows, padded(span(s).before + span(s).rows()));
    }
    Span span(int64_t s) const {
        int start = int(call.bounds[s]);
        return {start, int(call.bounds[s + 1]) - start, s == first ? 0 : shared};
    }
    // Where the span's keys and values begin, and the queries of one head that sees them.
    size_t keys_at(Span s) const { return s.start * call.kv_stride() + head * call.channels; }
    size_t queries_at(Span s, int j) const {
        return s.start * call.stride() + (head * call.group() + j) * call.channels;
    }
};

// Keys and values as they are and turned: a beginning's stay while its rests come in turn.
struct Keys {
    const Job& job;
    Matrix key, value, key_turned, weights;
    explicit Keys(const Job& job)
        : job(job), key(job.rows, job.wide), value(job.rows, job.wide),
          key_turned(job.wide, job.rows), weights(BLOCK, job.rows) {}
    template <class T>
    void take(Span s, const T* k, const T* v) {
        size_t at = job.keys_at(s), stride = job.call.kv_stride();
        key.fill(s.before, k + at, stride, s.length, job.call.channels);
        value.fill(s.before, v + at, stride, s.length, job.call.channels);
        key_turned.turn(s.before, key);
    }
    // Weights of BLOCK queries from `first` on; returns how many keys they meet, none behind.
    int weigh(Span s, Matrix& query, int first) {
        int seen = padded(s.before + first + BLOCK);
        product(weights.at(0), job.rows, query.at(first), job.wide, 1, key_turned.at(0), job.rows,
                BLOCK, job.wide, seen, false);
        softmax(weights, s.before + first, BLOCK, job.call.window);
        return seen;
    }
};

template <class T>
void attend_all(const Call& call, const T* q, const T* k, const T* v, T* out) {
#pragma omp parallel for schedule(dynamic)
    for (int number = 0; number < call.jobs(); ++number) {
        Job job(call, number);
        Keys keys(job);
        Matrix query(job.rows, job.wide), mixed(job.rows, job.wide);
        for (int64_t sample = job.first; sample < job.last; ++sample) {
            Span s = job.span(sample);
            keys.take(s, k, v);
            for (int j = 0; j < call.group(); ++j) {
                size_t at = job.queries_at(s, j);
                query.fill(0, q + at, call.stride(), s.length, call.channels, call.scale);
                for (int first = 0; first < s.length; first += BLOCK) {
                    int seen = keys.weigh(s, query, first);
                    product(mixed.at(first), job.wide, keys.weights.at(0), job.rows, 1,
                            keys.value.at(0), job.wide, BLOCK, seen, job.wide, false);
                }
                mixed.write(0, out + at, call.stride(), s.length, call.channels);
            }
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

// What the backward makes beside the forward's matrices.
struct Grads {
    Matrix query, out, d_query, d_key, d_value, d_weights, value_turned;
    explicit Grads(const Job& job)
        : query(job.rows, job.wide), out(job.rows, job.wide), d_query(job.rows, job.wide),
          d_key(job.rows, job.wide), d_value(job.rows, job.wide), d_weights(BLOCK, job.rows),
          value_turned(job.wide, job.rows) {}
    // BLOCK queries from `first` on; gradients of keys and values add up.
    void add(const Job& job, Keys& keys, Span s, int first) {
        int rows = job.rows, wide = job.wide, seen = keys.weigh(s, query, first);
        product(d_weights.at(0), rows, out.at(first), wide, 1, value_turned.at(0), rows, BLOCK,
                wide, seen, false);
        product(d_value.at(0), wide, keys.weights.at(0), 1, rows, out.at(first), wide, seen, BLOCK,
                wide, true);
        softmax_grad(keys.weights, d_weights, BLOCK, seen);
        product(d_query.at(first), wide, d_weights.at(0), rows, 1, keys.key.at(0), wide, BLOCK,
                seen, wide, false);
        product(d_key.at(0), wide, d_weights.at(0), 1, rows, query.at(first), wide, seen, BLOCK,
                wide, true);
    }
    template <class T>
    void write_keys(const Job& job, Span s, T* d_k, T* d_v) {
        size_t at = job.keys_at(s), stride = job.call.kv_stride();
        d_key.write(s.before, d_k + at, stride, s.length, job.call.channels);
        d_value.write(s.before, d_v + at, stride, s.length, job.call.channels);
    }
};

template <class T>
void attend_grad_all(const Call& call, const T* grad, const T* q, const T* k, const T* v, T* d_q,
                     T* d_k, T* d_v) {
#pragma omp parallel for schedule(dynamic)
    for (int number = 0; number < call.jobs(); ++number) {
        Job job(call, number);
        Keys keys(job);
        Grads grads(job);
        for (int64_t sample = job.first; sample < job.last; ++sample) {
            Span s = job.span(sample);
            keys.take(s, k, v);
            grads.value_turned.turn(s.before, keys.value);
            grads.d_key.clear(s.before);
            grads.d_value.clear(s.before);
            for (int j = 0; j < call.group(); ++j) {
                size_t at = job.queries_at(s, j);
                grads.query.fill(0, q + at, call.stride(), s.length, call.channels, call.scale);
                grads.out.fill(0, grad + at, call.stride(), s.length, call.channels);
                for (int first = 0; first < s.length; first += BLOCK)
                    grads.add(job, keys, s, first);
                grads.d_query.write(0, d_q + at, call.stride(), s.length, call.channels,
                                    call.scale);
            }
            if (s.before) grads.write_keys(job, s, d_k, d_v);
        }
        grads.write_keys(job, job.span(job.first), d_k, d_v);
    }
}

}  // namespace
