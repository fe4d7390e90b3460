/*
 * This file turns real rows into ring rows and back, each in one pass, on x86-64 with AVX2. wire/ring/coding.py says what
 * the numbers mean; its torch form gives the same bits if beta is the same. wire/ring/kernels.py is the only caller and
 * checks every shape and pointer.
 */
#include <immintrin.h>
#include <float.h>
#include <stddef.h>
#include <stdint.h>

#define AVX2 __attribute__((target("avx2")))
#define LARGEST DBL_MAX /* a number that is not at most this is infinite or NaN */

/* Returns the number that is rounded onto the ring: x, or x * alpha in float32. */
static inline float scaled(const float *x, const float *alpha, int64_t j) {
    return alpha ? x[j] * alpha[j] : x[j];
}

AVX2 static inline __m256 scaled_eight(const float *x, const float *alpha, int64_t j) {
    __m256 numbers = _mm256_loadu_ps(x + j);
    return alpha ? _mm256_mul_ps(numbers, _mm256_loadu_ps(alpha + j)) : numbers;
}

/* Sums the squares in float64, in which squares of float32 numbers neither overflow nor vanish. */
AVX2 static double sum_of_squares(const float *x, const float *alpha, int64_t d) {
    __m256d low = _mm256_setzero_pd(), high = low;
    int64_t j = 0;
    for (; j + 8 <= d; j += 8) {
        __m256 numbers = scaled_eight(x, alpha, j);
        __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(numbers)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(numbers, 1));
        low = _mm256_add_pd(low, _mm256_mul_pd(a, a));
        high = _mm256_add_pd(high, _mm256_mul_pd(b, b));
    }
    double lanes[4], sum = 0;
    _mm256_storeu_pd(lanes, _mm256_add_pd(low, high));
    for (int i = 0; i < 4; i++) sum += lanes[i];
    for (; j < d; j++) {
        double number = scaled(x, alpha, j);
        sum += number * number;
    }
    return sum;
}

/*
 * Rounds rows onto the ring: out = round(x * alpha / beta), with the smallest beta that the budget allows.
 *
 * rows: num_rows of d float32 numbers, `stride` apart. alpha: d numbers, or NULL for ones.
 * budget: the largest norm of a rounded row; smallest: the least beta. out: num_rows of d int32 numbers. betas: one for each row.
 * Returns the number of rows done: fewer than num_rows if the next row holds NaN or infinity.
 */
AVX2 int64_t veilbase_encode(const float *rows, int64_t stride, const float *alpha, int64_t num_rows, int64_t d,
                             double budget, double smallest, int32_t *out, float *betas) {
    for (int64_t i = 0; i < num_rows; i++, rows += stride, out += d) {
        double norm = _mm_cvtsd_f64(_mm_sqrt_pd(_mm_set1_pd(sum_of_squares(rows, alpha, d))));
        if (!(norm <= LARGEST)) return i;
        double beta = norm / budget;
        if (beta < smallest) beta = smallest;
        float inverse = (float)(1.0 / beta);
        betas[i] = (float)beta;
        __m256 inverses = _mm256_set1_ps(inverse);
        int64_t j = 0;
        for (; j + 8 <= d; j += 8) {
            /* This rounds half to even, as torch.round does; |x| * inverse < 2^31 by the budget. */
            __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(scaled_eight(rows, alpha, j), inverses));
            _mm256_storeu_si256((__m256i *)(out + j), rounded);
        }
        for (; j < d; j++) out[j] = _mm_cvtss_si32(_mm_set_ss(scaled(rows, alpha, j) * inverse));
    }
    return num_rows;
}

/* Adds a row of d numbers to another, mod 2^32. */
AVX2 void veilbase_add(int32_t *to, const int32_t *from, int64_t d) {
    uint32_t *sums = (uint32_t *)to;
    for (int64_t j = 0; j < d; j++) sums[j] += (uint32_t)from[j];
}

/*
 * Unmasks and scales replies: out = float(reply - effect mod 2^32) * alpha * beta, in float32 and that order.
 *
 * reply, effect: num_rows of m int32 numbers, `stride` and `effect_stride` apart; effect is NULL if there is none.
 * alpha: m numbers, or NULL for ones. betas: one for each row. out: num_rows of m float32 numbers, `out_stride` apart.
 */
AVX2 void veilbase_decode(const int32_t *reply, int64_t stride, const int32_t *effect, int64_t effect_stride,
                          const float *alpha, const float *betas, int64_t num_rows, int64_t m, float *out, int64_t out_stride) {
    for (int64_t i = 0; i < num_rows; i++, reply += stride, out += out_stride) {
        __m256 beta = _mm256_set1_ps(betas[i]);
        int64_t j = 0;
        for (; j + 8 <= m; j += 8) {
            __m256i numbers = _mm256_loadu_si256((const __m256i *)(reply + j));
            if (effect) numbers = _mm256_sub_epi32(numbers, _mm256_loadu_si256((const __m256i *)(effect + j)));
            __m256 reals = _mm256_cvtepi32_ps(numbers);
            if (alpha) reals = _mm256_mul_ps(reals, _mm256_loadu_ps(alpha + j));
            _mm256_storeu_ps(out + j, _mm256_mul_ps(reals, beta));
        }
        for (; j < m; j++) {
            uint32_t number = (uint32_t)reply[j] - (effect ? (uint32_t)effect[j] : 0);
            float real = (float)(int32_t)number;
            out[j] = (alpha ? real * alpha[j] : real) * betas[i];
        }
        if (effect) effect += effect_stride;
    }
}
