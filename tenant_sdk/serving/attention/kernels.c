/*
 * Attention of a few rows of each of many requests over the requests' own keys and values, on x86-64 with AVX2 and FMA.
 * tenant_sdk/serving/attention/kernels.py is the only caller and checks every shape and pointer.
 *
 * Keys and values are read where they are kept, as float32, bfloat16 or float8_e4m3fn with a scale for each vector, in
 * chunks that stay in the first cache. The softmax is computed online: a running maximum and sum, and a running output
 * that is scaled again whenever the maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax",
 * 2018; Dao et al., "FlashAttention", 2022).
 *
 * A row's result depends only on its own query and on the keys and values of its own request.
 */
#include <cpuid.h>
#include <immintrin.h>
#include <math.h> /* INFINITY */
#include <stdint.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define CHUNK 64 /* tokens */
#define LANES 8  /* floats of a register */

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT8 = 2 };

/* The rows of one request in one layer; kernels.py fills in these fields in this order. */
typedef struct {
    char *keys, *values;               /* (kv heads, capacity, head_dim) */
    float *key_scales, *value_scales;  /* (kv heads, capacity); only for FLOAT8 */
    int64_t capacity;                  /* tokens that there is memory for */
    int64_t at;                        /* the index of the first new token, which is the number of those before it */
    int64_t first_row, num_rows;       /* the request's rows among all rows of the step */
} piece;

/* The new keys or values of all rows of the step, in the type in which they are kept. */
typedef struct {
    const char *numbers; /* strides in bytes */
    int64_t head_stride, row_stride;
    const float *scales; /* strides in numbers */
    int64_t scale_head_stride, scale_row_stride;
} fresh;

typedef struct {
    const float *query; /* (row, head, head_dim), strides in numbers */
    int64_t row_stride, head_stride;
    float *out; /* (rows, heads, head_dim), contiguous */
    int64_t num_heads, num_kv_heads, head_dim, window, dtype;
    float scaling, softcap; /* softcap 0: none */
    const float *decoded;   /* the 256 values of FLOAT8 */
} setting;

int veilbase_attention_version(void) { return 2; }

/* Tells whether processor and operating system have what the rest of this file needs: AVX2 and FMA, and registers saved. */
int veilbase_attention_usable(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_FMA)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}

/* Returns how many floats of scratch memory `veilbase_attend` needs if no piece has more than `most_rows` rows. */
int64_t veilbase_attention_scratch(int64_t num_shared, int64_t most_rows, int64_t head_dim) {
    return CHUNK * (2 * head_dim + 1) + num_shared * most_rows * (head_dim + 2);
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

AVX2 static inline float sum8(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* e^x with a relative error below 2e-7; the polynomial is that of Cephes' expf. NaN stays NaN: if one of two numbers is
 * NaN, minimum and maximum are the second one. */
AVX2 static inline __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.33f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_fmadd_ps(_mm256_mul_ps(x, x), y, _mm256_add_ps(x, _mm256_set1_ps(1.0f)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

AVX2 static inline float exp1(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

/* tanh x = 1 - 2 / (e^2x + 1); the absolute error is below 2e-7. */
AVX2 static inline __m256 tanh8(__m256 x) {
    __m256 e = exp8(_mm256_add_ps(x, x));
    return _mm256_sub_ps(_mm256_set1_ps(1.0f), _mm256_div_ps(_mm256_set1_ps(2.0f), _mm256_add_ps(e, _mm256_set1_ps(1.0f))));
}

/* Returns `count` vectors from `source` as float32, in place where they are float32, else in `into`. */
AVX2 static const float *as_floats(const char *source, int64_t count, const setting *set, float *into) {
    int64_t num = count * set->head_dim;
    if (set->dtype == FLOAT32)
        return (const float *)source;
    if (set->dtype == BFLOAT16) {
        for (int64_t i = 0; i < num; i += LANES) {
            __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source + 2 * i)));
            _mm256_storeu_ps(into + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
        }
    } else {
        for (int64_t i = 0; i < num; i += LANES) {
            __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(source + i)));
            _mm256_storeu_ps(into + i, _mm256_i32gather_ps(set->decoded, wide, 4));
        }
    }
    return into;
}

/* ---- one chunk of tokens ---------------------------------------------------------------------------------------- */

/* scores[c] = query . keys[c] for c from `lo` to `hi`. */
AVX2 static void products(const float *query, const float *keys, int64_t dim, int64_t lo, int64_t hi, float *scores) {
    int64_t c = lo;
    for (; c + 4 <= hi; c += 4) {
        __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        const float *k = keys + c * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            __m256 q = _mm256_loadu_ps(query + i);
            s0 = _mm256_fmadd_ps(q, _mm256_loadu_ps(k + i), s0);
            s1 = _mm256_fmadd_ps(q, _mm256_loadu_ps(k + dim + i), s1);
            s2 = _mm256_fmadd_ps(q, _mm256_loadu_ps(k + 2 * dim + i), s2);
            s3 = _mm256_fmadd_ps(q, _mm256_loadu_ps(k + 3 * dim + i), s3);
        }
        __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(s0, s1), _mm256_hadd_ps(s2, s3));
        _mm_storeu_ps(scores + c, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }
    for (; c < hi; c++) {
        __m256 s = _mm256_setzero_ps();
        for (int64_t i = 0; i < dim; i += LANES)
            s = _mm256_fmadd_ps(_mm256_loadu_ps(query + i), _mm256_loadu_ps(keys + c * dim + i), s);
        scores[c] = sum8(s);
    }
}

/* sums[i] = factor * sums[i] + the sum over c from `lo` to `hi` of weights[c] * values[c][i]. */
AVX2 static void weigh(float *sums, float factor, const float *weights, const float *values, int64_t dim, int64_t lo, int64_t hi) {
    __m256 by = _mm256_set1_ps(factor);
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        __m256 s0 = _mm256_mul_ps(by, _mm256_loadu_ps(sums + i)), s1 = _mm256_mul_ps(by, _mm256_loadu_ps(sums + i + 8));
        __m256 s2 = _mm256_mul_ps(by, _mm256_loadu_ps(sums + i + 16)), s3 = _mm256_mul_ps(by, _mm256_loadu_ps(sums + i + 24));
        for (int64_t c = lo; c < hi; c++) {
            const float *v = values + c * dim + i;
            __m256 w = _mm256_set1_ps(weights[c]);
            s0 = _mm256_fmadd_ps(w, _mm256_loadu_ps(v), s0);
            s1 = _mm256_fmadd_ps(w, _mm256_loadu_ps(v + 8), s1);
            s2 = _mm256_fmadd_ps(w, _mm256_loadu_ps(v + 16), s2);
            s3 = _mm256_fmadd_ps(w, _mm256_loadu_ps(v + 24), s3);
        }
        _mm256_storeu_ps(sums + i, s0), _mm256_storeu_ps(sums + i + 8, s1);
        _mm256_storeu_ps(sums + i + 16, s2), _mm256_storeu_ps(sums + i + 24, s3);
    }
    for (; i < dim; i += LANES) {
        __m256 s = _mm256_mul_ps(by, _mm256_loadu_ps(sums + i));
        for (int64_t c = lo; c < hi; c++)
            s = _mm256_fmadd_ps(_mm256_set1_ps(weights[c]), _mm256_loadu_ps(values + c * dim + i), s);
        _mm256_storeu_ps(sums + i, s);
    }
}

/* Applies scaling, the keys' scales (or none) and softcap to scores from `lo` to `hi`. Both ends are widened to whole
 * registers, which the scores' memory allows; what is outside is not read later. */
AVX2 static void scale_scores(float *scores, const float *scales, const setting *set, int64_t lo, int64_t hi) {
    __m256 by = _mm256_set1_ps(set->scaling), cap = _mm256_set1_ps(set->softcap);
    if (scales != NULL)
        for (int64_t c = lo; c < hi; c++)
            scores[c] *= scales[c];
    for (int64_t c = lo & ~(int64_t)(LANES - 1); c < hi; c += LANES) {
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(scores + c), by);
        if (set->softcap != 0.0f)
            s = _mm256_mul_ps(cap, tanh8(_mm256_div_ps(s, cap)));
        _mm256_storeu_ps(scores + c, s);
    }
}

/* Replaces scores from `lo` to `hi` by e^(score - largest), and returns their sum. */
AVX2 static float weights_of(float *scores, float largest, int64_t lo, int64_t hi) {
    float sum = 0.0f;
    for (int64_t c = lo & ~(int64_t)(LANES - 1); c < hi; c += LANES)
        _mm256_storeu_ps(scores + c, exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + c), _mm256_set1_ps(largest))));
    for (int64_t c = lo; c < hi; c++)
        sum += scores[c];
    return sum;
}

/* ---- one request ------------------------------------------------------------------------------------------------ */

static int64_t item_bytes(int64_t dtype) { return dtype == FLOAT32 ? 4 : dtype == BFLOAT16 ? 2 : 1; }

/* Copies a request's new vectors of one kv head to where they are kept. */
static void keep(char *kept, float *kept_scales, const piece *p, const fresh *new, int64_t head, const setting *set) {
    int64_t bytes = set->head_dim * item_bytes(set->dtype);
    for (int64_t row = 0; row < p->num_rows; row++) {
        const char *from = new->numbers + head * new->head_stride + (p->first_row + row) * new->row_stride;
        memcpy(kept + (head * p->capacity + p->at + row) * bytes, from, (size_t)bytes);
        if (set->dtype == FLOAT8)
            kept_scales[head * p->capacity + p->at + row] =
                new->scales[head * new->scale_head_stride + (p->first_row + row) * new->scale_row_stride];
    }
}

AVX2 static void attend_head(const piece *p, int64_t head, const setting *set, float *scratch) {
    int64_t dim = set->head_dim, shared = set->num_heads / set->num_kv_heads, num = shared * p->num_rows;
    int64_t bytes = dim * item_bytes(set->dtype), end = p->at + p->num_rows;
    int64_t begin = set->window > 0 && p->at + 1 > set->window ? p->at + 1 - set->window : 0;
    float *scores = scratch, *keys = scores + CHUNK, *values = keys + CHUNK * dim;
    float *sums = values + CHUNK * dim, *largest = sums + num * dim, *totals = largest + num;
    memset(sums, 0, (size_t)(num * dim) * sizeof(float));
    for (int64_t m = 0; m < num; m++)
        largest[m] = -INFINITY, totals[m] = 0.0f;
    for (int64_t from = begin; from < end; from += CHUNK) {
        int64_t count = end - from < CHUNK ? end - from : CHUNK, offset = head * p->capacity + from;
        const float *k = as_floats(p->keys + offset * bytes, count, set, keys);
        const float *v = as_floats(p->values + offset * bytes, count, set, values);
        if (end - from > CHUNK) /* the next chunk comes from memory while this one is computed */
            for (int64_t line = 0; line < CHUNK * bytes; line += 64) {
                _mm_prefetch(p->keys + (offset + CHUNK) * bytes + line, _MM_HINT_T1);
                _mm_prefetch(p->values + (offset + CHUNK) * bytes + line, _MM_HINT_T1);
            }
        for (int64_t m = 0; m < num; m++) {
            int64_t row = m / shared, last = p->at + row + 1; /* the row sees tokens before `last` */
            int64_t first = set->window > 0 && last > set->window ? last - set->window : 0;
            int64_t lo = first > from ? first - from : 0, hi = last - from < count ? last - from : count;
            if (lo >= hi)
                continue;
            const float *query = set->query + (p->first_row + row) * set->row_stride + (head * shared + m % shared) * set->head_stride;
            products(query, k, dim, lo, hi, scores);
            scale_scores(scores, set->dtype == FLOAT8 ? p->key_scales + offset : NULL, set, lo, hi);
            float most = largest[m];
            for (int64_t c = lo; c < hi; c++)
                most = scores[c] > most ? scores[c] : most;
            float factor = totals[m] == 0.0f ? 0.0f : exp1(largest[m] - most);
            totals[m] = totals[m] * factor + weights_of(scores, most, lo, hi);
            largest[m] = most;
            if (set->dtype == FLOAT8)
                for (int64_t c = lo; c < hi; c++)
                    scores[c] *= p->value_scales[offset + c];
            weigh(sums + m * dim, factor, scores, v, dim, lo, hi);
        }
    }
    for (int64_t m = 0; m < num; m++) {
        float *out = set->out + ((p->first_row + m / shared) * set->num_heads + head * shared + m % shared) * dim;
        for (int64_t i = 0; i < dim; i++)
            out[i] = sums[m * dim + i] / totals[m];
    }
}

/*
 * Keeps the new keys and values of some pieces' heads, and computes the attention of their rows. The kv heads of all
 * pieces are counted through, and those from `first` to `last` are done here; the others may be done by other threads at
 * the same time, each with its own scratch memory.
 */
void veilbase_attend(
    const piece *pieces, int64_t first, int64_t last, const fresh *keys, const fresh *values, const setting *set, float *scratch
) {
    for (int64_t i = first; i < last; i++) {
        const piece *p = pieces + i / set->num_kv_heads;
        int64_t head = i % set->num_kv_heads;
        keep(p->keys, p->key_scales, p, keys, head, set);
        keep(p->values, p->value_scales, p, values, head, set);
        attend_head(p, head, set, scratch);
    }
}
