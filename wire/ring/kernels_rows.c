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

/* ---- numbers of fewer bits: wire/SPEC.md, section 3, "Widths" ---------------------------------------------------------- */

/* Returns a number rounded to its upper `bits` bits, fewer than 32, halves up, mod 2^32: the others are zero. */
static inline uint32_t rounded(uint32_t number, int64_t bits) {
    uint32_t half = (uint32_t)1 << (31 - bits);
    return (number + half) & ~(2 * half - 1);
}

/* Adds `count` numbers to others, mod 2^32, and rounds the sums to their upper `bits` bits. */
AVX2 void veilbase_add(int32_t *to, const int32_t *from, int64_t count, int64_t bits) {
    uint32_t *sums = (uint32_t *)to;
    uint32_t half = bits < 32 ? (uint32_t)1 << (31 - bits) : 0, kept = bits < 32 ? ~(2 * half - 1) : UINT32_MAX;
    for (int64_t j = 0; j < count; j++) sums[j] = (sums[j] + (uint32_t)from[j] + half) & kept;
}

/*
 * Packs the upper `bits` bits of numbers, which it rounds first. Each row takes d * bits bits, least significant first,
 * and ends with zero bits up to a whole byte.
 *
 * rows: num_rows of d numbers, `stride` apart. bits: even, 16 to 28.
 */
AVX2 void veilbase_pack(const int32_t *rows, int64_t stride, int64_t num_rows, int64_t d, int64_t bits, uint8_t *out) {
    int64_t row_bytes = (d * bits + 7) / 8, four_bytes = bits / 2;
    const __m256i half = _mm256_set1_epi32(1 << (31 - bits)), low = _mm256_set1_epi64x(UINT32_MAX);
    const __m128i dropped = _mm_cvtsi64_si128(32 - bits), one = _mm_cvtsi64_si128(bits);
    const __m128i two = _mm_cvtsi64_si128(2 * bits), rest = _mm_cvtsi64_si128(64 - 2 * bits);
    for (int64_t i = 0; i < num_rows; i++, rows += stride, out += row_bytes) {
        uint8_t *to = out, *end = out + row_bytes;
        int64_t j = 0;
        /* Sixteen bytes are stored for four numbers; the bytes behind theirs are written again with the next ones. */
        for (; j + 8 <= d && to + four_bytes + 16 <= end; j += 8, to += bits) {
            __m256i numbers = _mm256_loadu_si256((const __m256i *)(rows + j));
            numbers = _mm256_srl_epi32(_mm256_add_epi32(numbers, half), dropped);
            __m256i pairs = _mm256_or_si256(_mm256_and_si256(numbers, low), _mm256_sll_epi64(_mm256_srli_epi64(numbers, 32), one));
            __m256i second = _mm256_unpackhi_epi64(pairs, pairs);
            __m256i first = _mm256_or_si256(pairs, _mm256_sll_epi64(second, two));
            __m256i packed = _mm256_unpacklo_epi64(first, _mm256_srl_epi64(second, rest));
            _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
            _mm_storeu_si128((__m128i *)(to + four_bytes), _mm256_extracti128_si256(packed, 1));
        }
        uint64_t waiting = 0;
        int64_t count = 0; /* how many bits wait */
        for (; j < d; j++) {
            waiting |= (uint64_t)(rounded((uint32_t)rows[j], bits) >> (32 - bits)) << count;
            for (count += bits; count >= 8; count -= 8, waiting >>= 8) *to++ = (uint8_t)waiting;
        }
        if (count) *to = (uint8_t)waiting;
    }
}

/* Does what `veilbase_add` does, and packs the sums, which are one row, as `veilbase_pack` does. */
void veilbase_add_and_pack(int32_t *to, const int32_t *from, int64_t count, int64_t bits, uint8_t *out) {
    veilbase_add(to, from, count, bits);
    veilbase_pack(to, count, 1, count, bits, out);
}

/*
 * Undoes `veilbase_pack`: each number gets its upper bits, and zeros below them.
 *
 * packed: num_rows * ((d * bits + 7) / 8) bytes. out: num_rows * d numbers.
 * Returns the bits that end the rows, joined by or: zero if the peer kept to the format.
 */
AVX2 int64_t veilbase_unpack(const uint8_t *packed, int64_t num_rows, int64_t d, int64_t bits, int32_t *out) {
    int64_t row_bytes = (d * bits + 7) / 8, four_bytes = bits / 2, last_bits = d * bits % 8;
    const uint8_t *end = packed + num_rows * row_bytes;
    uint8_t places[16], ends = 0;
    uint32_t moves[4];
    for (int k = 0; k < 4; k++) {
        for (int byte = 0; byte < 4; byte++) places[4 * k + byte] = (uint8_t)(k * bits / 8 + byte);
        moves[k] = (uint32_t)(32 - bits - k * bits % 8);
    }
    const __m256i shuffle = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)places));
    const __m256i move = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)moves));
    const __m256i kept = _mm256_set1_epi32(-(1 << (32 - bits)));
    for (int64_t i = 0; i < num_rows; i++, packed += row_bytes, out += d) {
        const uint8_t *from = packed;
        int64_t j = 0;
        for (; j + 8 <= d && from + four_bytes + 16 <= end; j += 8, from += bits) {
            __m256i bytes = _mm256_loadu2_m128i((const __m128i *)(from + four_bytes), (const __m128i *)from);
            __m256i numbers = _mm256_sllv_epi32(_mm256_shuffle_epi8(bytes, shuffle), move);
            _mm256_storeu_si256((__m256i *)(out + j), _mm256_and_si256(numbers, kept));
        }
        uint64_t waiting = 0;
        int64_t count = 0;
        for (; j < d; j++) {
            for (; count < bits; count += 8) waiting |= (uint64_t)*from++ << count;
            out[j] = (int32_t)((uint32_t)waiting << (32 - bits));
            waiting >>= bits, count -= bits;
        }
        if (last_bits) ends |= (uint8_t)(packed[row_bytes - 1] >> last_bits);
    }
    return ends;
}

/* Loads eight numbers of an effect, of which there are four bytes each, or the high three: then the low byte is zero. */
AVX2 static inline __m256i eight_of_effect(const uint8_t *at, int64_t effect_bytes) {
    if (effect_bytes == 4) return _mm256_loadu_si256((const __m256i *)at);
    const __m256i places = _mm256_setr_epi8(-1, 0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11,
                                            -1, 4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15);
    /* The second half is loaded from four bytes before it, so that nothing behind the numbers is read. */
    return _mm256_shuffle_epi8(_mm256_loadu2_m128i((const __m128i *)(at + 8), (const __m128i *)at), places);
}

static inline uint32_t one_of_effect(const uint8_t *at, int64_t effect_bytes) {
    uint32_t number = 0;
    for (int64_t i = 0; i < effect_bytes; i++) number |= (uint32_t)at[i] << 8 * (4 - effect_bytes + i);
    return number;
}

/*
 * Unmasks and scales replies: out = float(reply - effect mod 2^32) * alpha * beta, in float32 and that order.
 *
 * reply: num_rows of m int32 numbers, `stride` apart. effect: num_rows of m numbers of `effect_bytes` bytes, 4 or 3,
 * `effect_stride` bytes apart; NULL if there is none. Of three bytes, the numbers are 256 times theirs.
 * alpha: m numbers, or NULL for ones. betas: one for each row. out: num_rows of m float32 numbers, `out_stride` apart.
 */
AVX2 void veilbase_decode(const int32_t *reply, int64_t stride, const uint8_t *effect, int64_t effect_stride,
                          int64_t effect_bytes, const float *alpha, const float *betas, int64_t num_rows, int64_t m,
                          float *out, int64_t out_stride) {
    for (int64_t i = 0; i < num_rows; i++, reply += stride, out += out_stride) {
        __m256 beta = _mm256_set1_ps(betas[i]);
        int64_t j = 0;
        for (; j + 8 <= m; j += 8) {
            __m256i numbers = _mm256_loadu_si256((const __m256i *)(reply + j));
            if (effect) numbers = _mm256_sub_epi32(numbers, eight_of_effect(effect + j * effect_bytes, effect_bytes));
            __m256 reals = _mm256_cvtepi32_ps(numbers);
            if (alpha) reals = _mm256_mul_ps(reals, _mm256_loadu_ps(alpha + j));
            _mm256_storeu_ps(out + j, _mm256_mul_ps(reals, beta));
        }
        for (; j < m; j++) {
            uint32_t number = (uint32_t)reply[j] - (effect ? one_of_effect(effect + j * effect_bytes, effect_bytes) : 0);
            float real = (float)(int32_t)number;
            out[j] = (alpha ? real * alpha[j] : real) * betas[i];
        }
        if (effect) effect += effect_stride;
    }
}
