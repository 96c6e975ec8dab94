// The decode step's small operations on a CPU, for float32 and bfloat16. Sums are float32; a bfloat16 result is
// rounded where PyTorch's own chain of operators rounds it. Vectors are the compiler's (GCC, Clang), so nothing
// here names an instruction set. Every function splits its work over `threads` of the OpenMP pool that PyTorch
// uses too, or runs it alone where waking a second thread would cost more.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int W = 16;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};

inline float get(float x) { return x; }
inline float get(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline void put(float *to, float x) { *to = x; }
inline void put(bf16 *to, float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class T> inline float rounded(float x) {
    T y;
    put(&y, x);
    return get(y);
}

inline vf load(const float *p) {
    vf out;
    std::memcpy(&out, p, sizeof out);
    return out;
}
inline vf load(const bf16 *p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

inline vu nearest(vf x) {  // bfloat16 in the low half of each lane
    vu bits = (vu)x;
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (vu){} + 0x7fc0;
}
inline void store(float *p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16 *p, vf x) {
    vh half = __builtin_convertvector(nearest(x), vh);
    std::memcpy(p, &half, sizeof half);
}
template <class T> inline vf rounded(vf x) { return sizeof(T) == 4 ? x : (vf)(nearest(x) << 16); }

// The sums of 16 vectors, in their order: four rounds of adding halves, each filling a vector from two.
inline vf sums(const vf *x) {
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return SHUFFLE(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline float sum(vf x) {
    float lanes[W], out = 0;
    store(lanes, x);
    for (int i = 0; i < W; i++) out += lanes[i];
    return out;
}

// exp with a relative error of some 1e-7: 2^n times a polynomial on [-ln2 / 2, ln2 / 2] (Cephes' coefficients).
inline vf exponential(vf x) {
    const float low = -87.0f, high = 88.0f;
    x = x < low ? (vf){} + low : x;
    x = x > high ? (vf){} + high : x;
    vf scaled = x * 1.44269504088896341f;
    vf shift = scaled < 0 ? (vf){} - 0.5f : (vf){} + 0.5f;
    vi n = __builtin_convertvector(scaled + shift, vi);
    vf whole = __builtin_convertvector(n, vf);
    vf r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (vf)((n + 127) << 23);
}

template <class T> float mean_square(const T *x, int64_t size) {
    vf total = {};
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        vf v = load(x + i);
        total += v * v;
    }
    float out = sum(total);
    for (; i < size; i++) out += get(x[i]) * get(x[i]);
    return out / size;
}

template <class T>
void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 65536)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * size;
        T *to = out + row * size;
        float scale = 1.0f / std::sqrt(mean_square(from, size) + eps);
        int64_t i = 0;
        for (; i + W <= size; i += W) store(to + i, load(from + i) * scale * load(weight + i));
        for (; i < size; i++) put(to + i, get(from[i]) * scale * get(weight[i]));
    }
}

template <class T>
void swiglu(const T *gate, const T *up, int64_t stride, T *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const T *g = gate + row * stride, *u = up + row * stride;
        T *to = out + row * size;
        int64_t i = 0;
        for (; i + W <= size; i += W) {
            vf x = load(g + i);
            store(to + i, rounded<T>(x / (exponential(-x) + 1.0f)) * load(u + i));
        }
        for (; i < size; i++) {
            float x = get(g[i]);
            put(to + i, rounded<T>(x / (std::exp(-x) + 1.0f)) * get(u[i]));
        }
    }
}

// The first `rotated` of each token's heads, in place: an optional RMSNorm per head, then RoPE.
template <class T>
void rope(T *heads, const T *cos, const T *sin, const T *scale, int64_t tokens, int64_t stride, int64_t rotated,
          int64_t size, float eps, int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (tokens * rotated * size > 65536)
    for (int64_t token = 0; token < tokens; token++) {
        const T *c = cos + token * size, *s = sin + token * size;
        for (int64_t head = 0; head < rotated; head++) {
            T *x = heads + token * stride + head * size;
            if (scale) {
                float by = 1.0f / std::sqrt(mean_square(x, size) + eps);
                const T *w = scale + head * size;
                for (int64_t i = 0; i < size; i += W) store(x + i, rounded<T>(load(x + i) * by) * load(w + i));
            }
            int64_t i = 0;
            for (; i + W <= half; i += W) {
                vf a = load(x + i), b = load(x + half + i);
                store(x + i, rounded<T>(a * load(c + i)) + b * load(s + i));
                store(x + half + i, rounded<T>(b * load(c + half + i)) + a * load(s + half + i));
            }
            for (; i < half; i++) {
                float a = get(x[i]), b = get(x[half + i]);
                put(x + i, rounded<T>(a * get(c[i])) + b * get(s[i]));
                put(x + half + i, rounded<T>(b * get(c[half + i])) + a * get(s[half + i]));
            }
        }
    }
}

// Keys and values of a step to their rows' own positions in a (2, rows, kv_heads, capacity, size) store.
template <class T>
void write(const T *k, const T *v, int64_t stride, T *kv, const int64_t *rows, const int64_t *positions, int64_t B,
           int64_t n, int64_t kv_heads, int64_t size, int64_t store_rows, int64_t capacity) {
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const int64_t row = rows ? rows[b] : b;
                T *to = kv + ((row * kv_heads + head) * capacity + positions[b * n + i]) * size;
                const int64_t from = (b * n + i) * stride + head * size;
                std::memcpy(to, k + from, size * sizeof(T));
                std::memcpy(to + store_rows * kv_heads * capacity * size, v + from, size * sizeof(T));
            }
}

// out[r] = sum over t of weights[r][t] * values[t], for R queries whose sums stay in registers.
template <class T, int V, int R>
void weigh(const float *weights, int64_t width, const T *values, int64_t count, float *out) {
    vf total[R][V] = {};
    for (int64_t t = 0; t < count; t++)
        for (int j = 0; j < V; j++) {
            vf value = load(values + (t * V + j) * W);
            for (int r = 0; r < R; r++) total[r][j] += value * weights[r * width + t];
        }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < V; j++) store(out + (r * V + j) * W, total[r][j]);
}

// One key/value head of one row: M = n * groups queries over `seen[n - 1]` keys, each to its own position.
template <class T, int V>
void attend(const float *q, const T *keys, const T *values, const int64_t *seen, int64_t n, int64_t groups,
            float *scores, float *out) {
    constexpr int64_t D = V * W;
    const int64_t M = n * groups, longest = seen[n - 1], width = (longest + W - 1) / W * W;
    for (int64_t t = 0; t < width; t += W) {
        float block[W * D];  // the last one repeats the last key
        for (int i = 0; i < W; i++) {
            const T *key = keys + (t + i < longest ? t + i : longest - 1) * D;
            for (int j = 0; j < V; j++) store(block + i * D + j * W, load(key + j * W));
        }
        for (int64_t m = 0; m < M; m++) {
            vf products[W];
            for (int i = 0; i < W; i++) {
                products[i] = load(q + m * D) * load(block + i * D);
                for (int j = 1; j < V; j++) products[i] += load(q + m * D + j * W) * load(block + i * D + j * W);
            }
            store(scores + m * width + t, sums(products));
        }
    }
    for (int64_t m = 0; m < M; m++) {
        float *s = scores + m * width, largest = s[0];
        const int64_t count = seen[m / groups];
        for (int64_t t = 1; t < count; t++) largest = s[t] > largest ? s[t] : largest;
        vf total = {};
        for (int64_t t = 0; t < width; t += W) {
            vf p = exponential(load(s + t) - largest);
            for (int i = 0; t + W > count && i < W; i++) p[i] = t + i < count ? p[i] : 0;
            total += p;
            store(s + t, p);
        }
        const float by = 1.0f / sum(total);
        for (int64_t t = 0; t < width; t += W) store(s + t, load(s + t) * by);
    }
    constexpr int R = V <= 4 ? 4 : 2;
    int64_t m = 0;
    for (; m + R <= M; m += R) weigh<T, V, R>(scores + m * width, width, values, longest, out + m * D);
    for (; m + 2 <= M; m += 2) weigh<T, V, 2>(scores + m * width, width, values, longest, out + m * D);
    for (; m < M; m++) weigh<T, V, 1>(scores + m * width, width, values, longest, out + m * D);
}

template <class T, int V>
void attention(const T *q, int64_t q_stride, const T *kv, const int64_t *rows, const int64_t *positions, T *out,
               int64_t B, int64_t n, int64_t heads, int64_t kv_heads, int64_t store_rows, int64_t capacity,
               float scale, int threads) {
    constexpr int64_t D = V * W;
    const int64_t groups = heads / kv_heads, M = n * groups;
    const T *values = kv + store_rows * kv_heads * capacity * D;
#pragma omp parallel num_threads(threads) if (B * kv_heads > 1)
    {
        std::vector<float> queries(M * D), results(M * D), scores;
        std::vector<int64_t> seen(n);
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < B * kv_heads; pair++) {
            const int64_t b = pair / kv_heads, head = pair % kv_heads, row = rows ? rows[b] : b;
            for (int64_t i = 0; i < n; i++) {
                seen[i] = positions[b * n + i] + 1;
                for (int64_t g = 0; g < groups; g++)
                    for (int64_t d = 0; d < D; d += W)
                        store(&queries[(i * groups + g) * D + d],
                              load(q + (b * n + i) * q_stride + (head * groups + g) * D + d) * scale);
            }
            scores.resize(M * ((seen[n - 1] + W - 1) / W * W));
            const int64_t at = (row * kv_heads + head) * capacity * D;
            attend<T, V>(queries.data(), kv + at, values + at, seen.data(), n, groups, scores.data(),
                         results.data());
            for (int64_t i = 0; i < n; i++)
                for (int64_t g = 0; g < groups; g++)
                    for (int64_t d = 0; d < D; d += W)
                        store(out + ((b * n + i) * heads + head * groups + g) * D + d,
                              load(&results[(i * groups + g) * D + d]));
        }
    }
}

}  // namespace

#define FOR(NAME, T)                                                                                                 \
    extern "C" void rms_norm_##NAME(const T *x, const T *weight, T *out, int64_t rows, int64_t size, float eps,      \
                                    int threads) {                                                                   \
        rms_norm(x, weight, out, rows, size, eps, threads);                                                          \
    }                                                                                                                \
    extern "C" void swiglu_##NAME(const T *gate, const T *up, int64_t stride, T *out, int64_t rows, int64_t size,    \
                                  int threads) {                                                                     \
        swiglu(gate, up, stride, out, rows, size, threads);                                                          \
    }                                                                                                                \
    extern "C" void rope_##NAME(T *heads, const T *cos, const T *sin, const T *scale, int64_t tokens,                \
                                int64_t stride, int64_t rotated, int64_t size, float eps, int threads) {             \
        rope(heads, cos, sin, scale, tokens, stride, rotated, size, eps, threads);                                   \
    }                                                                                                                \
    extern "C" void write_##NAME(const T *k, const T *v, int64_t stride, T *kv, const int64_t *rows,                 \
                                 const int64_t *positions, int64_t B, int64_t n, int64_t kv_heads, int64_t size,     \
                                 int64_t store_rows, int64_t capacity) {                                             \
        write(k, v, stride, kv, rows, positions, B, n, kv_heads, size, store_rows, capacity);                        \
    }                                                                                                                \
    extern "C" void attention_##NAME(const T *q, int64_t q_stride, const T *kv, const int64_t *rows,                 \
                                     const int64_t *positions, T *out, int64_t B, int64_t n, int64_t heads,          \
                                     int64_t kv_heads, int64_t size, int64_t store_rows, int64_t capacity,           \
                                     float scale, int threads) {                                                     \
        auto *run = size == 16   ? attention<T, 1>                                                                   \
                    : size == 32 ? attention<T, 2>                                                                   \
                    : size == 64 ? attention<T, 4>                                                                   \
                    : size == 96 ? attention<T, 6>                                                                   \
                                 : attention<T, 8>; /* 128: HEAD_SIZES of __init__.py */                             \
        run(q, q_stride, kv, rows, positions, out, B, n, heads, kv_heads, store_rows, capacity, scale, threads);     \
    }
FOR(float32, float)
FOR(bfloat16, bf16)
