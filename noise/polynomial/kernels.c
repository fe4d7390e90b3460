/*
 * Products in Z_q[X]/(X^N + 1), q = 2^32, of 32-bit polynomials with ternary polynomials, by floating-point transforms on
 * x86-64 with AVX2 and FMA. noise/polynomial/kernels.py is the only caller and checks every shape and pointer;
 * noise/polynomial/negacyclic.py says why the result is exact.
 *
 * A polynomial a is folded into N/2 complex numbers a_j + i*a_{j+N/2}, that is, into C[X]/(X^{N/2} - i). It is then
 * reduced step by step modulo the factors of X^{N/2} - i, four at a time, down to its values at the N/2 roots.
 * Products are computed there, and the inverse transform undoes the steps. No number ever changes its position.
 * (Right-angle convolution: Crandall and Fagin, 1994; transforms as reductions: Bernstein, "Multidigit multiplication
 * for mathematicians", 2001, section 4.)
 *
 * Four features (columns of A or of a hint) are transformed at once, one in each lane of a register, so no step needs
 * a shuffle. LANES numbers of real parts are followed by LANES of imaginary ones.
 *
 * The code takes constant time: no branch and no address depends on a number.
 */
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define LANES 4
#define COMPLEX (2 * LANES)         /* doubles of one complex number in every lane */
#define GROUPS 4                    /* groups of lanes that are done one after the other before rows are written out */
#define WIDTH (GROUPS * LANES)      /* 16 features: a cache line of int32 */
#define ROUNDER 6755399441055744.0  /* 1.5 * 2^52: the low 32 bits of x + this are round(x) mod 2^32 */

typedef struct {
    __m256d re, im;
} number;

AVX2 static inline number load(const double *x) {
    return (number){_mm256_loadu_pd(x), _mm256_loadu_pd(x + LANES)};
}

AVX2 static inline void store(double *x, number a) {
    _mm256_storeu_pd(x, a.re);
    _mm256_storeu_pd(x + LANES, a.im);
}

AVX2 static inline number add(number a, number b) {
    return (number){_mm256_add_pd(a.re, b.re), _mm256_add_pd(a.im, b.im)};
}

AVX2 static inline number sub(number a, number b) {
    return (number){_mm256_sub_pd(a.re, b.re), _mm256_sub_pd(a.im, b.im)};
}

/* These return a + i*b and a - i*b. */
AVX2 static inline number add_turned(number a, number b) {
    return (number){_mm256_sub_pd(a.re, b.im), _mm256_add_pd(a.im, b.re)};
}

AVX2 static inline number sub_turned(number a, number b) {
    return (number){_mm256_add_pd(a.re, b.im), _mm256_sub_pd(a.im, b.re)};
}

AVX2 static inline number times(number a, __m256d re, __m256d im) {
    return (number){_mm256_fmsub_pd(a.re, re, _mm256_mul_pd(a.im, im)), _mm256_fmadd_pd(a.re, im, _mm256_mul_pd(a.im, re))};
}

/* Returns a times the conjugate of re + i*im. */
AVX2 static inline number times_conjugate(number a, __m256d re, __m256d im) {
    return (number){_mm256_fmadd_pd(a.re, re, _mm256_mul_pd(a.im, im)), _mm256_fmsub_pd(a.im, re, _mm256_mul_pd(a.re, im))};
}

/* ---- transforms ------------------------------------------------------------------------------------------------- */

/*
 * Transforms in place. `twiddles` holds the roots, pass by pass and node by node: if the number of doublings is odd,
 * a first pass of one node has w with w^2 = i; then each node, modulo X^size - r, has the three numbers w, w^2, w^3
 * with w^4 = r.
 */

AVX2 static void reduce(double *x, int64_t half, const double *twiddles) {
    int64_t size = half;
    if (__builtin_ctzll((uint64_t)half) & 1) {
        size /= 2;
        __m256d re = _mm256_broadcast_sd(twiddles), im = _mm256_broadcast_sd(twiddles + 1);
        for (int64_t j = 0; j < size; j++) {
            double *first = x + j * COMPLEX, *second = first + size * COMPLEX;
            number a = load(first), b = times(load(second), re, im);
            store(first, add(a, b));
            store(second, sub(a, b));
        }
        twiddles += 2;
    }
    for (; size > 1; size /= 4) {
        int64_t step = size / 4 * COMPLEX;
        for (double *node = x; node < x + half * COMPLEX; node += size * COMPLEX, twiddles += 6) {
            __m256d re1 = _mm256_broadcast_sd(twiddles), im1 = _mm256_broadcast_sd(twiddles + 1);
            __m256d re2 = _mm256_broadcast_sd(twiddles + 2), im2 = _mm256_broadcast_sd(twiddles + 3);
            __m256d re3 = _mm256_broadcast_sd(twiddles + 4), im3 = _mm256_broadcast_sd(twiddles + 5);
            for (double *at = node; at < node + step; at += COMPLEX) {
                number a = load(at), b = times(load(at + step), re1, im1);
                number c = times(load(at + 2 * step), re2, im2), d = times(load(at + 3 * step), re3, im3);
                number even = add(a, c), odd = sub(a, c), sum = add(b, d), difference = sub(b, d);
                store(at, add(even, sum));
                store(at + step, sub(even, sum));
                store(at + 2 * step, add_turned(odd, difference));
                store(at + 3 * step, sub_turned(odd, difference));
            }
        }
    }
}

/* Undoes `reduce`, except for a factor of half. `end` points behind the last twiddle. */
AVX2 static void rebuild(double *x, int64_t half, const double *end) {
    int is_odd = __builtin_ctzll((uint64_t)half) & 1;
    int64_t top = is_odd ? half / 2 : half;
    for (int64_t size = 4; size <= top; size *= 4) {
        int64_t step = size / 4 * COMPLEX;
        end -= half / size * 6;
        const double *twiddles = end;
        for (double *node = x; node < x + half * COMPLEX; node += size * COMPLEX, twiddles += 6) {
            __m256d re1 = _mm256_broadcast_sd(twiddles), im1 = _mm256_broadcast_sd(twiddles + 1);
            __m256d re2 = _mm256_broadcast_sd(twiddles + 2), im2 = _mm256_broadcast_sd(twiddles + 3);
            __m256d re3 = _mm256_broadcast_sd(twiddles + 4), im3 = _mm256_broadcast_sd(twiddles + 5);
            for (double *at = node; at < node + step; at += COMPLEX) {
                number first = load(at), second = load(at + step), third = load(at + 2 * step), fourth = load(at + 3 * step);
                number even = add(first, second), sum = sub(first, second);
                number odd = add(third, fourth), turned = sub(third, fourth);
                store(at, add(even, odd));
                store(at + step, times_conjugate(sub_turned(sum, turned), re1, im1));
                store(at + 2 * step, times_conjugate(sub(even, odd), re2, im2));
                store(at + 3 * step, times_conjugate(add_turned(sum, turned), re3, im3));
            }
        }
    }
    if (is_odd) {
        end -= 2;
        __m256d re = _mm256_broadcast_sd(end), im = _mm256_broadcast_sd(end + 1);
        for (int64_t j = 0; j < top; j++) {
            double *first = x + j * COMPLEX, *second = first + top * COMPLEX;
            number a = load(first), b = load(second);
            store(first, add(a, b));
            store(second, times_conjugate(sub(a, b), re, im));
        }
    }
}

/* Folds and transforms one polynomial of up to LANES columns; unused lanes hold zeros. */
AVX2 static void transform_lanes(double *out, const int32_t *matrix, int64_t stride, int64_t lanes, int64_t half, const double *twiddles) {
    __m128i kept = _mm_cmpgt_epi32(_mm_set1_epi32((int32_t)lanes), _mm_setr_epi32(0, 1, 2, 3));
    for (int64_t j = 0; j < half; j++, matrix += stride) {
        __m256d re = _mm256_cvtepi32_pd(_mm_maskload_epi32(matrix, kept));
        __m256d im = _mm256_cvtepi32_pd(_mm_maskload_epi32(matrix + half * stride, kept));
        store(out + j * COMPLEX, (number){re, im});
    }
    reduce(out, half, twiddles);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* Computes x = sum over i of hat_i * secret_i, number by number. */
AVX2 static void multiply(double *x, const double *hat, const double *secret, int64_t rank, int64_t half) {
    for (int64_t j = 0; j < half; j++) {
        number sum = {_mm256_setzero_pd(), _mm256_setzero_pd()};
        for (int64_t i = 0; i < rank; i++) {
            number a = load(hat + (i * half + j) * COMPLEX);
            __m256d re = _mm256_broadcast_sd(secret + 2 * (i * half + j)), im = _mm256_broadcast_sd(secret + 2 * (i * half + j) + 1);
            sum.re = _mm256_fnmadd_pd(a.im, im, _mm256_fmadd_pd(a.re, re, sum.re));
            sum.im = _mm256_fmadd_pd(a.im, re, _mm256_fmadd_pd(a.re, im, sum.im));
        }
        store(x + j * COMPLEX, sum);
    }
}

/* The largest distances to an integer so far, and lanes of ones where a distance was not a number. */
typedef struct {
    __m256d largest, wrong;
} distance;

/* Rounds, reduces mod 2^32 and writes. */
AVX2 static inline distance write_rounded(int32_t *out, __m256d x, __m256d scale, distance seen) {
    __m256d exact = _mm256_mul_pd(x, scale), rounder = _mm256_set1_pd(ROUNDER), moved = _mm256_add_pd(exact, rounder);
    __m256d error = _mm256_andnot_pd(_mm256_set1_pd(-0.0), _mm256_sub_pd(exact, _mm256_sub_pd(moved, rounder)));
    __m256i words = _mm256_permutevar8x32_epi32(_mm256_castpd_si256(moved), _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(words));
    seen.largest = _mm256_max_pd(error, seen.largest);
    seen.wrong = _mm256_or_pd(seen.wrong, _mm256_cmp_pd(error, error, _CMP_UNORD_Q));
    return seen;
}

AVX2 static inline __m256i eight_errors(const char *error, int64_t error_bytes) {
    if (error_bytes == 1) return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)error));
    if (error_bytes == 2) return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)error));
    return _mm256_loadu_si256((const __m256i *)error);
}

static inline int32_t one_error(const char *error, int64_t error_bytes) {
    if (error_bytes == 1) return *(const int8_t *)error;
    if (error_bytes == 2) return *(const int16_t *)error;
    return *(const int32_t *)error;
}

/*
 * Writes rows of WIDTH numbers, plus the errors, to their places. Whole vectors bypass the caches: they are used much
 * later, and rows that lie a multiple of 4 KiB apart would evict each other.
 */
AVX2 static void write_rows(int32_t *out, int64_t stride, const int32_t *rows, int64_t degree, int64_t width,
                            const char *error, int64_t error_bytes, int64_t error_stride) {
    int is_whole = width == WIDTH && ((uintptr_t)out & 31) == 0 && stride % 8 == 0;
    for (int64_t t = 0; t < degree; t++, out += stride, rows += WIDTH) {
        const char *errors = error ? error + t * error_stride * error_bytes : NULL;
        if (is_whole) {
            __m256i left = _mm256_loadu_si256((const __m256i *)rows), right = _mm256_loadu_si256((const __m256i *)(rows + 8));
            if (errors) {
                left = _mm256_add_epi32(left, eight_errors(errors, error_bytes));
                right = _mm256_add_epi32(right, eight_errors(errors + 8 * error_bytes, error_bytes));
            }
            _mm256_stream_si256((__m256i *)out, left);
            _mm256_stream_si256((__m256i *)(out + 8), right);
        } else {
            for (int64_t c = 0; c < width; c++)
                out[c] = (int32_t)((uint32_t)rows[c] + (uint32_t)(errors ? one_error(errors + c * error_bytes, error_bytes) : 0));
        }
    }
}

typedef struct {
    int64_t num_blocks, rank, degree;
    const double *twiddles, *twiddles_end;
    const double *secrets;                  /* num_blocks x rank x N/2 x 2 */
    const char *error;                      /* or NULL */
    int64_t error_bytes, error_row, error_block;
    int32_t *out;
    int64_t out_row, out_block;
    double *numbers;                        /* scratch: N/2 x COMPLEX */
    int32_t *rows;                          /* scratch: N x WIDTH */
} task;

/* Computes up to WIDTH features, from column `feature` on, of all blocks. */
AVX2 static distance combine_width(const task *all, const double *hat, int64_t feature, int64_t width, distance seen) {
    int64_t half = all->degree / 2, group_doubles = all->rank * half * COMPLEX;
    __m256d scale = _mm256_set1_pd(1.0 / (double)half);
    for (int64_t b = 0; b < all->num_blocks; b++) {
        for (int64_t g = 0; g * LANES < width; g++) {
            multiply(all->numbers, hat + g * group_doubles, all->secrets + b * all->rank * half * 2, all->rank, half);
            rebuild(all->numbers, half, all->twiddles_end);
            for (int64_t j = 0; j < half; j++) {
                number x = load(all->numbers + j * COMPLEX);
                int32_t *to = all->rows + j * WIDTH + g * LANES;
                seen = write_rounded(to, x.re, scale, seen);
                seen = write_rounded(to + half * WIDTH, x.im, scale, seen);
            }
        }
        const char *error = all->error ? all->error + (b * all->error_block + feature) * all->error_bytes : NULL;
        write_rows(all->out + b * all->out_block + feature, all->out_row, all->rows, all->degree, width, error,
                   all->error_bytes, all->error_row);
    }
    return seen;
}

/* ---- what noise/polynomial/kernels.py calls -------------------------------------------------------------------------------- */

/* Returns the version of these functions' signatures. It grows by one with every change of them, here and in kernels.py. */
int veilbase_masks_version(void) {
    return 2;
}

/* Tells whether processor and operating system have what the rest of this file needs: AVX2 and FMA, and registers saved. */
int veilbase_masks_usable(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_FMA)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}

/* Returns how many doubles of scratch memory `veilbase_combine` needs. */
int64_t veilbase_mask_scratch(int64_t rank, int64_t degree) {
    return degree / 2 * COMPLEX + degree * WIDTH / 2 + GROUPS * rank * (degree / 2) * COMPLEX;
}

/*
 * Transforms a matrix of rank * degree rows of `features` int32 numbers, `stride` apart.
 * out: for each LANES features, N/2 complex numbers in LANES lanes for each of the rank polynomials.
 */
void veilbase_transform(const int32_t *matrix, int64_t stride, int64_t rank, int64_t degree, int64_t features,
                        const double *twiddles, double *out) {
    int64_t half = degree / 2;
    for (int64_t c = 0; c < features; c += LANES)
        for (int64_t i = 0; i < rank; i++, out += half * COMPLEX)
            transform_lanes(out, matrix + i * degree * stride + c, stride, MIN(LANES, features - c), half, twiddles);
}

/*
 * Computes features `first` to `last` of a product, of all blocks, plus an error.
 *
 * hat: the result of `veilbase_transform`, from feature `first` on, which begins a group of LANES; or NULL.
 * matrix: if hat is NULL, the matrix's numbers, from feature `first` on.
 * secrets: num_blocks x rank x N/2 complex numbers. error: NULL, or integers of 1, 2 or 4 bytes, which are added.
 * out: num_blocks x degree rows. Strides are in numbers. scratch: see `veilbase_mask_scratch`.
 * Returns the largest distance of a coefficient to the nearest integer; infinity if one was not a number.
 */
AVX2 double veilbase_combine(const double *hat, const int32_t *matrix, int64_t stride, const double *secrets, int64_t num_blocks,
                     int64_t rank, int64_t degree, int64_t first, int64_t last, const double *twiddles,
                     int64_t num_twiddles, const char *error, int64_t error_bytes, int64_t error_row, int64_t error_block,
                     int32_t *out, int64_t out_row, int64_t out_block, double *scratch) {
    int64_t half = degree / 2;
    double *numbers = scratch, *made = numbers + half * COMPLEX;
    task all = {num_blocks, rank, degree, twiddles, twiddles + num_twiddles, secrets, error, error_bytes, error_row,
                error_block, out, out_row, out_block, numbers, (int32_t *)(made + GROUPS * rank * half * COMPLEX)};
    distance seen = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    for (int64_t c = first; c < last; c += WIDTH) {
        int64_t width = MIN(WIDTH, last - c);
        const double *from = hat ? hat + (c - first) / LANES * rank * half * COMPLEX : made;
        if (!hat) veilbase_transform(matrix + (c - first), stride, rank, degree, width, twiddles, made);
        seen = combine_width(&all, from, c, width, seen);
    }
    _mm_sfence(); /* Threads that are notified after this see the stores that bypassed the caches. */
    double lanes[LANES], largest = 0;
    _mm256_storeu_pd(lanes, seen.largest);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return _mm256_movemask_pd(seen.wrong) ? HUGE_VAL : largest;
}
