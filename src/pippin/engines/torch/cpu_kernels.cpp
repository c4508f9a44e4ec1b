// What lies between a decoder layer's products on a CPU; compiled for the machine it runs on.
//
// Numbers are float or bfloat16 in memory and float in registers. Rows are contiguous.
// T tokens, D hidden, V vocabulary.

#include <algorithm>
#include <cmath>

#include "cpu_attention.h"
#include "cpu_numbers.h"

namespace {

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

// silu(gate) * up is made again on the way; `d_up` may stand where `grad` does.
template <class T>
void gate_grad_all(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up, T* gated,
                   int64_t count) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < count; ++i) {
        float d = get(grad[i]), g = get(gate[i]), u = get(up[i]);
        float share = chance(g), silu = g * share;
        put(d_gate[i], d * u * (share + silu * (1.0f - share)));
        put(d_up[i], d * silu);
        put(gated[i], silu * u);
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
    void gate_grad##TAIL(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up, T* gated, \
                         int64_t count) {                                                         \
        gate_grad_all(grad, gate, up, d_gate, d_up, gated, count);                                \
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
