/*
 * Products in Z_q[X]/(X^N + 1), q = 2^32, of 32-bit polynomials with ternary polynomials, by floating-point transforms on
 * x86-64. noise/polynomial/kernels.py is the only caller and checks every shape and pointer;
 * noise/polynomial/negacyclic.py says why the result is exact.
 *
 * A polynomial a is folded into N/2 complex numbers a_j + i*a_{j+N/2}, that is, into C[X]/(X^{N/2} - i). It is then
 * reduced step by step modulo the factors of X^{N/2} - i, four at a time, down to its values at the N/2 roots.
 * Products are computed there, and the inverse transform undoes the steps. No number ever changes its position.
 * (Right-angle convolution: Crandall and Fagin, 1994; transforms as reductions: Bernstein, "Multidigit multiplication
 * for mathematicians", 2001, section 4.)
 *
 * LANES features (columns of A or of a hint) are transformed at once, one in each lane of a register, so no step needs
 * a shuffle. LANES numbers of real parts are followed by LANES of imaginary ones.
 *
 * The code takes constant time: no branch and no address depends on a number, but for the largest distance to an integer,
 * which is compared at the end.
 *
 * kernels.c and kernels_avx512.c include this file, each for its own registers. Before that they define:
 * - LANES, 4 or 8; TARGET, the attribute of a function that needs these registers; FORM(name), the name of a function
 *   that kernels.py calls;
 * - `vec`, LANES doubles, with v_load, v_store, v_broadcast (from memory), v_zero, v_add, v_sub, v_mul, v_fmadd(a, b, c) =
 *   a*b + c and v_fnmadd(a, b, c) = c - a*b;
 * - `lane_mask` with first_lanes(count); load_whole, load_partial and load_packed, which `load_numbers` calls;
 *   store_low_halves, which writes the low 32 bits of each lane; `bits`, LANES numbers of 64 bits, and
 *   largest_of(bits, vec), see `write_rounded`.
 */
#define COMPLEX (2 * LANES)         /* doubles of one complex number in every lane */
#define WIDTH 16                    /* features that are written at once: a cache line of int32 */
#define GROUPS (WIDTH / LANES)      /* groups of lanes that are done one after the other before rows are written out */
#define PACKED_BYTES 3              /* of a number whose low byte is zero */
#define LINE 64                     /* bytes of a cache line */

static const double ROUNDER = 6755399441055744.0; /* 1.5 * 2^52: the low 32 bits of x + this are round(x) mod 2^32 */

typedef struct {
    vec re, im;
} number;

TARGET static inline number load(const double *x) {
    return (number){v_load(x), v_load(x + LANES)};
}

TARGET static inline void store(double *x, number a) {
    v_store(x, a.re);
    v_store(x + LANES, a.im);
}

TARGET static inline number add(number a, number b) {
    return (number){v_add(a.re, b.re), v_add(a.im, b.im)};
}

TARGET static inline number sub(number a, number b) {
    return (number){v_sub(a.re, b.re), v_sub(a.im, b.im)};
}

/* These return a + i*b and a - i*b. */
TARGET static inline number add_turned(number a, number b) {
    return (number){v_sub(a.re, b.im), v_add(a.im, b.re)};
}

TARGET static inline number sub_turned(number a, number b) {
    return (number){v_add(a.re, b.im), v_sub(a.im, b.re)};
}

TARGET static inline number times(number a, vec re, vec im) {
    return (number){v_fnmadd(a.im, im, v_mul(a.re, re)), v_fmadd(a.re, im, v_mul(a.im, re))};
}

/* Returns a times the conjugate of re + i*im. */
TARGET static inline number times_conjugate(number a, vec re, vec im) {
    return (number){v_fmadd(a.re, re, v_mul(a.im, im)), v_fnmadd(a.re, im, v_mul(a.im, re))};
}

/* ---- transforms ------------------------------------------------------------------------------------------------- */



/* A node of a transform: its four numbers are taken by reference, so that each pass can load and store in its own way. */
typedef struct {
    vec re1, im1, re2, im2, re3, im3;
} roots;

TARGET INLINE roots load_roots(const double *twiddles) {
    return (roots){v_broadcast(twiddles),     v_broadcast(twiddles + 1), v_broadcast(twiddles + 2),
                   v_broadcast(twiddles + 3), v_broadcast(twiddles + 4), v_broadcast(twiddles + 5)};
}

/* Reduces a polynomial modulo X^4 - r to its values at the four roots of r, number by number. */
TARGET INLINE void split(number x[4], roots w) {
    number a = x[0], b = times(x[1], w.re1, w.im1), c = times(x[2], w.re2, w.im2), d = times(x[3], w.re3, w.im3);
    number even = add(a, c), odd = sub(a, c), sum = add(b, d), difference = sub(b, d);
    x[0] = add(even, sum);
    x[1] = sub(even, sum);
    x[2] = add_turned(odd, difference);
    x[3] = sub_turned(odd, difference);
}

/* Undoes `split`, except for a factor of four. */
TARGET INLINE void join(number x[4], roots w) {
    number even = add(x[0], x[1]), sum = sub(x[0], x[1]), odd = add(x[2], x[3]), turned = sub(x[2], x[3]);
    x[0] = add(even, odd);
    x[1] = times_conjugate(sub_turned(sum, turned), w.re1, w.im1);
    x[2] = times_conjugate(sub(even, odd), w.re2, w.im2);
    x[3] = times_conjugate(add_turned(sum, turned), w.re3, w.im3);
}

TARGET INLINE void load_four(number x[4], const double *at, int64_t step) {
    for (int k = 0; k < 4; k++) x[k] = load(at + k * step);
}

TARGET INLINE void store_four(double *at, int64_t step, const number x[4]) {
    for (int k = 0; k < 4; k++) store(at + k * step, x[k]);
}

/*
 * Transforms in place, from nodes of `size` numbers down to values. `twiddles` holds the roots, pass by pass and node by
 * node: if the number of doublings of half is odd, a first pass of one node has w with w^2 = i; then each node, modulo
 * X^size - r, has the three numbers w, w^2, w^3 with w^4 = r.
 */
TARGET static void reduce(double *x, int64_t half, int64_t size, const double *twiddles) {
    if (size == half && (__builtin_ctzll((uint64_t)half) & 1)) {
        size /= 2;
        vec re = v_broadcast(twiddles), im = v_broadcast(twiddles + 1);
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
            roots w = load_roots(twiddles);
            for (double *at = node; at < node + step; at += COMPLEX) {
                number four[4];
                load_four(four, at, step);
                split(four, w);
                store_four(at, step, four);
            }
        }
    }
}

/* Undoes the passes of `reduce` for nodes of `size` to `last` numbers. Returns the twiddles of the pass of `last`. */
TARGET static const double *rebuild(double *x, int64_t half, int64_t size, int64_t last, const double *twiddles) {
    for (; size <= last; size *= 4) {
        int64_t step = size / 4 * COMPLEX;
        twiddles -= half / size * 6;
        const double *own = twiddles;
        for (double *node = x; node < x + half * COMPLEX; node += size * COMPLEX, own += 6) {
            roots w = load_roots(own);
            for (double *at = node; at < node + step; at += COMPLEX) {
                number four[4];
                load_four(four, at, step);
                join(four, w);
                store_four(at, step, four);
            }
        }
    }
    return twiddles;
}

/* How the numbers of a matrix lie in memory. */
enum { WHOLE, PARTIAL, PACKED }; /* int32; int32 in the first lanes, the others are zero; numbers of three bytes */

typedef struct {
    const char *first; /* the first column's number in the first row */
    int64_t row_bytes;
    lane_mask kept;    /* for PARTIAL: which lanes have a column */
} source;

/*
 * Loads a row's numbers of LANES columns. Of packed numbers, the low byte is zero: the four bytes before them are read too,
 * and not four bytes behind them, since a file of hints has a header.
 */
TARGET INLINE vec load_numbers(const char *at, int kind, lane_mask kept) {
    if (kind == PARTIAL) return load_partial((const int32_t *)at, kept);
    return kind == WHOLE ? load_whole((const int32_t *)at) : load_packed(at);
}

/* Folds and transforms one polynomial of LANES columns. */
TARGET INLINE void transform_lanes(double *out, source matrix, int kind, int64_t half, const double *twiddles) {
    int64_t row = matrix.row_bytes;
    const char *at = matrix.first, *imaginary = at + half * row;
    if (half < 4 || (__builtin_ctzll((uint64_t)half) & 1)) {
        for (int64_t j = 0; j < half; j++)
            store(out + j * COMPLEX, (number){load_numbers(at + j * row, kind, matrix.kept),
                                              load_numbers(imaginary + j * row, kind, matrix.kept)});
        reduce(out, half, half, twiddles);
        return;
    }
    roots w = load_roots(twiddles); /* The first pass is done while the numbers are folded. */
    for (int64_t j = 0; j < half / 4; j++) {
        number four[4];
        for (int k = 0; k < 4; k++) {
            int64_t from = (j + k * (half / 4)) * row;
            four[k] = (number){load_numbers(at + from, kind, matrix.kept), load_numbers(imaginary + from, kind, matrix.kept)};
        }
        split(four, w);
        store_four(out + j * COMPLEX, half / 4 * COMPLEX, four);
    }
    reduce(out, half, half / 4, twiddles + 6);
}

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* Transforms `features` columns of a matrix; see `veilbase_transform`. Packed columns are a multiple of LANES. */
TARGET static void transform_columns(const char *matrix, int64_t row_bytes, int is_packed, int64_t rank, int64_t degree,
                                   int64_t features, const double *twiddles, double *out) {
    int64_t half = degree / 2;
    for (int64_t c = 0; c < features; c += LANES) {
        int32_t lanes = (int32_t)MIN(LANES, features - c);
        lane_mask kept = first_lanes(lanes);
        for (int64_t i = 0; i < rank; i++, out += half * COMPLEX) {
            source from = {matrix + i * degree * row_bytes + c * (is_packed ? PACKED_BYTES : 4), row_bytes, kept};
            if (is_packed) transform_lanes(out, from, PACKED, half, twiddles);
            else if (lanes == LANES) transform_lanes(out, from, WHOLE, half, twiddles);
            else transform_lanes(out, from, PARTIAL, half, twiddles);
        }
    }
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* Returns the sum over i of hat_i * secret_i, for number j. */
TARGET INLINE number multiplied(const double *hat, const double *secret, int64_t rank, int64_t half, int64_t j) {
    number sum = {v_zero(), v_zero()};
    for (int64_t i = 0; i < rank; i++) {
        number a = load(hat + (i * half + j) * COMPLEX);
        vec re = v_broadcast(secret + 2 * (i * half + j)), im = v_broadcast(secret + 2 * (i * half + j) + 1);
        sum.re = v_fnmadd(a.im, im, v_fmadd(a.re, re, sum.re));
        sum.im = v_fmadd(a.im, re, v_fmadd(a.re, im, sum.im));
    }
    return sum;
}

/*
 * Rounds, reduces mod 2^32 and writes. Returns a bound of the largest distances to an integer so far: the largest high
 * and low halves of their bits, since doubles that are not negative are ordered as their bits are. What is not a number
 * is above all others.
 */
TARGET INLINE bits write_rounded(int32_t *out, vec exact, bits seen) {
    vec rounder = v_broadcast(&ROUNDER), moved = v_add(exact, rounder);
    store_low_halves(out, moved);
    return largest_of(seen, v_sub(exact, v_sub(moved, rounder)));
}

/* Returns the bound that `write_rounded` gathered; infinity for what is not a number. */
TARGET static double bound(bits seen) {
    double lanes[LANES], largest = 0;
    memcpy(lanes, &seen, sizeof lanes);
    for (int i = 0; i < LANES; i++) {
        if (!(lanes[i] < HUGE_VAL)) return HUGE_VAL;
        largest = lanes[i] > largest ? lanes[i] : largest;
    }
    return largest;
}

TARGET static inline __m256i eight_errors(const char *error, int64_t error_bytes) {
    if (error_bytes == 1) return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)error));
    if (error_bytes == 2) return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)error));
    return _mm256_loadu_si256((const __m256i *)error);
}

static inline int32_t one_error(const char *error, int64_t error_bytes) {
    if (error_bytes == 1) return *(const int8_t *)error;
    if (error_bytes == 2) return *(const int16_t *)error;
    return *(const int32_t *)error;
}

/* Returns where the i-th four of the WIDTH columns of a row are, whose columns lie in groups of LANES. */
#define FOUR(row, group, i) ((const __m128i *)((row) + 4 * (i) / LANES * (group) + 4 * (i) % LANES))

/*
 * Writes the rows of up to WIDTH columns, plus the errors, to their places. `rows` has the columns in groups of LANES, one
 * group after the other. Whole vectors bypass the caches: they are used much later, and rows that lie a multiple of 4 KiB
 * apart would evict each other.
 */
TARGET static void write_rows(int32_t *out, int64_t stride, const int32_t *rows, int64_t degree, int64_t width,
                            const char *error, int64_t error_bytes, int64_t error_stride) {
    int is_whole = width == WIDTH && ((uintptr_t)out & 31) == 0 && stride % 8 == 0;
    int64_t group = degree * LANES;
    for (int64_t t = 0; t < degree; t++, out += stride, rows += LANES) {
        const char *errors = error ? error + t * error_stride * error_bytes : NULL;
        if (is_whole) {
            __m256i left = _mm256_loadu2_m128i(FOUR(rows, group, 1), FOUR(rows, group, 0));
            __m256i right = _mm256_loadu2_m128i(FOUR(rows, group, 3), FOUR(rows, group, 2));
            if (errors) {
                left = _mm256_add_epi32(left, eight_errors(errors, error_bytes));
                right = _mm256_add_epi32(right, eight_errors(errors + 8 * error_bytes, error_bytes));
            }
            _mm256_stream_si256((__m256i *)out, left);
            _mm256_stream_si256((__m256i *)(out + 8), right);
        } else {
            for (int64_t c = 0; c < width; c++) {
                uint32_t added = errors ? (uint32_t)one_error(errors + c * error_bytes, error_bytes) : 0;
                out[c] = (int32_t)((uint32_t)rows[c / LANES * group + c % LANES] + added);
            }
        }
    }
}

/* Rounds a row of WIDTH numbers to their high three bytes, halves up, mod 2^32, and joins these. */
TARGET INLINE void pack_sixteen(__m128i packed[3], const int32_t *rows, int64_t group) {
    const __m128i half = _mm_set1_epi32(1 << 7);
    const __m128i low = _mm_setr_epi8(1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, -1, -1, -1, -1);
    const __m128i high = _mm_setr_epi8(-1, -1, -1, -1, 1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15);
    __m128i four[4];
    for (int i = 0; i < 4; i++) four[i] = _mm_add_epi32(_mm_loadu_si128(FOUR(rows, group, i)), half);
    packed[0] = _mm_alignr_epi8(_mm_shuffle_epi8(four[1], low), _mm_shuffle_epi8(four[0], high), 4);
    packed[1] = _mm_alignr_epi8(_mm_shuffle_epi8(four[2], low), _mm_shuffle_epi8(four[1], high), 8);
    packed[2] = _mm_alignr_epi8(_mm_shuffle_epi8(four[3], low), _mm_shuffle_epi8(four[2], high), 12);
}

/*
 * Packs the rows of WIDTH columns, and writes whole cache lines past the caches: part of a line would take longer than a
 * line. `waiting` has three vectors for each row. The first `count` of them come before these columns in the row, and
 * begin a line; afterwards it has what does not fill a line.
 */
TARGET INLINE void write_lines(uint8_t *out, int64_t row_bytes, const int32_t *rows, int64_t degree, __m128i *waiting, int count) {
    out -= 16 * count;
    for (int64_t t = 0; t < degree; t++, out += row_bytes, rows += LANES, waiting += 3) {
        __m128i parts[6], *to = (__m128i *)out;
        for (int i = 0; i < count; i++) parts[i] = _mm_loadu_si128(waiting + i);
        pack_sixteen(parts + count, rows, degree * LANES);
        for (int i = 0; count && i < 4; i++) _mm_stream_si128(to + i, parts[i]);
        for (int i = count ? 4 : 0; i < count + 3; i++) _mm_storeu_si128(waiting + i - (count ? 4 : 0), parts[i]);
    }
}

/* Packs the rows of up to WIDTH columns and writes them to their places, through the caches. */
TARGET static void write_packed(uint8_t *out, int64_t row_bytes, const int32_t *rows, int64_t degree, int64_t width) {
    int64_t group = degree * LANES;
    for (int64_t t = 0; t < degree; t++, out += row_bytes, rows += LANES) {
        if (width == WIDTH) {
            __m128i parts[3];
            pack_sixteen(parts, rows, group);
            for (int i = 0; i < 3; i++) _mm_storeu_si128((__m128i *)out + i, parts[i]);
            continue;
        }
        for (int64_t c = 0; c < width; c++) {
            uint32_t number = (uint32_t)rows[c / LANES * group + c % LANES] + (1 << 7);
            for (int i = 0; i < PACKED_BYTES; i++) out[PACKED_BYTES * c + i] = (uint8_t)(number >> (8 * i + 8));
        }
    }
}

typedef struct {
    int64_t num_blocks, rank, degree, first;
    const double *twiddles_end;
    const double *secrets;                  /* num_blocks x rank x N/2 x 2 */
    const char *error;                      /* of the features from `first` on, or NULL */
    int64_t error_bytes, error_row, error_block;
    uint8_t *const *out;                    /* num_blocks pointers to N rows each */
    int64_t out_row, out_bytes;             /* bytes of a row and of a number: 4 or PACKED_BYTES */
    double *numbers;                        /* scratch: N/2 x COMPLEX */
    int32_t *rows;                          /* scratch: num_blocks x GROUPS x N x LANES */
    __m128i *waiting;                       /* scratch: num_blocks x N x 3, if packed rows consist of whole cache lines, or NULL */
} task;

/* Multiplies the transforms of LANES columns by the secrets of a block, transforms back and writes N rows of LANES numbers. */
TARGET static bits combine_lanes(const task *all, const double *hat, const double *secret, int32_t *rows, bits seen) {
    int64_t half = all->degree / 2, quarter = half / 4, rank = all->rank;
    double *x = all->numbers;
    const double *twiddles = all->twiddles_end;
    if (half < 16 || (__builtin_ctzll((uint64_t)half) & 1)) {
        for (int64_t j = 0; j < half; j++) store(x + j * COMPLEX, multiplied(hat, secret, rank, half, j));
        int is_odd = __builtin_ctzll((uint64_t)half) & 1;
        int64_t top = is_odd ? half / 2 : half;
        twiddles = rebuild(x, half, 4, top, twiddles);
        if (is_odd) {
            vec re = v_broadcast(twiddles - 2), im = v_broadcast(twiddles - 1);
            for (int64_t j = 0; j < top; j++) {
                double *first = x + j * COMPLEX, *second = first + top * COMPLEX;
                number a = load(first), b = load(second);
                store(first, add(a, b));
                store(second, times_conjugate(sub(a, b), re, im));
            }
        }
        for (int64_t j = 0; j < half; j++) {
            number done = load(x + j * COMPLEX);
            seen = write_rounded(rows + j * LANES, done.re, seen);
            seen = write_rounded(rows + (half + j) * LANES, done.im, seen);
        }
        return seen;
    }
    twiddles -= quarter * 6; /* The first pass is done while the numbers are multiplied. */
    for (int64_t j = 0; j < half; j += 4) {
        number four[4];
        for (int k = 0; k < 4; k++) four[k] = multiplied(hat, secret, rank, half, j + k);
        join(four, load_roots(twiddles + j / 4 * 6));
        store_four(x + j * COMPLEX, COMPLEX, four);
    }
    twiddles = rebuild(x, half, 16, quarter, twiddles) - 6;
    roots w = load_roots(twiddles); /* The last pass is done while the numbers are rounded. */
    for (int64_t j = 0; j < quarter; j++) {
        number four[4];
        load_four(four, x + j * COMPLEX, quarter * COMPLEX);
        join(four, w);
        for (int k = 0; k < 4; k++) {
            int32_t *to = rows + (j + k * quarter) * LANES;
            seen = write_rounded(to, four[k].re, seen);
            seen = write_rounded(to + half * LANES, four[k].im, seen);
        }
    }
    return seen;
}

/* Tells whether `write_lines` can write the features from `first` on. */
static int has_lines(const task *all) {
    uintptr_t places = (uintptr_t)all->out_row | (uintptr_t)(all->first * all->out_bytes);
    for (int64_t b = 0; b < all->num_blocks; b++) places |= (uintptr_t)all->out[b];
    return places % LINE == 0;
}

/* Returns how many vectors of each row wait, once the columns up to `feature` were written, WIDTH at a time. */
static int num_waiting(const task *all, int64_t feature) {
    return all->waiting ? (int)((feature - all->first) / WIDTH * 3 % 4) : 0;
}

/* Writes up to WIDTH features of all blocks, from column `feature` on, whose rows `combine_lanes` made. */
TARGET static void write_width(const task *all, int64_t feature, int64_t width) {
    int64_t degree = all->degree, row = all->out_row;
    for (int64_t b = 0; b < all->num_blocks; b++) {
        const int32_t *rows = all->rows + b * degree * WIDTH;
        uint8_t *out = all->out[b] + feature * all->out_bytes;
        if (all->out_bytes == PACKED_BYTES) {
            __m128i *waiting = all->waiting ? all->waiting + b * degree * 3 : NULL;
            if (!waiting || width < WIDTH) write_packed(out, row, rows, degree, width);
            else switch (num_waiting(all, feature)) {
                case 0: write_lines(out, row, rows, degree, waiting, 0); break;
                case 1: write_lines(out, row, rows, degree, waiting, 1); break;
                case 2: write_lines(out, row, rows, degree, waiting, 2); break;
                default: write_lines(out, row, rows, degree, waiting, 3);
            }
            continue;
        }
        int64_t place = b * all->error_block + feature - all->first;
        const char *error = all->error ? all->error + place * all->error_bytes : NULL;
        write_rows((int32_t *)out, row / 4, rows, degree, width, error, all->error_bytes, all->error_row);
    }
}

/* Writes what `write_lines` left waiting, up to column `last`. */
TARGET static void write_rest(const task *all, int64_t last) {
    int count = num_waiting(all, last);
    int64_t end = (all->first + (last - all->first) / WIDTH * WIDTH) * PACKED_BYTES;
    for (int64_t i = 0; count && i < all->num_blocks * all->degree; i++) {
        uint8_t *row = all->out[i / all->degree] + i % all->degree * all->out_row;
        memcpy(row + end - 16 * count, all->waiting + 3 * i, (size_t)(16 * count));
    }
}

/* Returns how many doubles of scratch memory `veilbase_combine` needs. */
int64_t FORM(veilbase_mask_scratch)(int64_t num_blocks, int64_t rank, int64_t degree) {
    return (1 + rank) * (degree / 2) * COMPLEX + num_blocks * degree * (WIDTH / 2 + 6);
}

/*
 * Transforms a matrix of rank * degree rows of `features` int32 numbers, `stride` apart.
 * out: for each LANES features, N/2 complex numbers in LANES lanes for each of the rank polynomials.
 */
void FORM(veilbase_transform)(const int32_t *matrix, int64_t stride, int64_t rank, int64_t degree, int64_t features,
                        const double *twiddles, double *out) {
    transform_columns((const char *)matrix, 4 * stride, 0, rank, degree, features, twiddles, out);
}

/*
 * Transforms `count` polynomials of N int8 numbers, one after the other, and divides by N/2.
 * out: for each N/2 complex numbers. scratch: N/2 numbers in LANES lanes.
 */
TARGET void FORM(veilbase_transform_secrets)(const int8_t *secrets, int64_t count, int64_t degree, const double *twiddles, double *out,
                                     double *scratch) {
    int64_t half = degree / 2;
    double scale = 1.0 / (double)half; /* a power of two, so the products are exact */
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t lanes = MIN(LANES, count - i);
        for (int64_t j = 0; j < half; j++) {
            for (int64_t l = 0; l < LANES; l++) {
                const int8_t *polynomial = secrets + (i + l) * degree;
                scratch[j * COMPLEX + l] = l < lanes ? polynomial[j] : 0;
                scratch[j * COMPLEX + LANES + l] = l < lanes ? polynomial[half + j] : 0;
            }
        }
        reduce(scratch, half, half, twiddles);
        for (int64_t l = 0; l < lanes; l++, out += degree) {
            for (int64_t j = 0; j < half; j++) {
                out[2 * j] = scratch[j * COMPLEX + l] * scale;
                out[2 * j + 1] = scratch[j * COMPLEX + LANES + l] * scale;
            }
        }
    }
    memset(scratch, 0, (size_t)(half * COMPLEX) * sizeof *scratch); /* It outlives this call. */
}

/*
 * Computes features `first` to `last` of a product, of all blocks, plus an error.
 *
 * hat: the result of `veilbase_transform`, from feature `first` on, which begins a group of LANES; or NULL.
 * matrix: if hat is NULL, the matrix's numbers. If `tile` is 0: int32, from feature `first` on, `row_bytes` from row to
 * row. If not: the whole matrix of `features` columns, in tiles of `tile` columns, one after the other; of each number
 * the high three bytes, row after row. Then `tile`, `first` and all features are multiples of LANES, and the four bytes
 * before the matrix may be read.
 * secrets: num_blocks x rank x N/2 complex numbers, divided by N/2. error: NULL, or integers of 1, 2 or 4 bytes, from
 * feature `first` on, which are added; strides in numbers. out: for each block, where its N rows begin, `out_row` bytes
 * from row to row, of `out_bytes` a number: 4, or 3 for the high three bytes of each, rounded, without an error. scratch:
 * see `veilbase_mask_scratch`.
 * Returns a bound of the distances of the coefficients to the nearest integers, above the largest by less than one part
 * in a million; infinity if one was not a number.
 */
TARGET double FORM(veilbase_combine)(const double *hat, const char *matrix, int64_t row_bytes, int64_t tile, int64_t features,
                             const double *secrets, int64_t num_blocks, int64_t rank, int64_t degree, int64_t first,
                             int64_t last, const double *twiddles, int64_t num_twiddles, const char *error,
                             int64_t error_bytes, int64_t error_row, int64_t error_block, uint8_t *const *out,
                             int64_t out_row, int64_t out_bytes, double *scratch) {
    int64_t half = degree / 2, group_doubles = rank * half * COMPLEX;
    double *numbers = scratch, *made = numbers + half * COMPLEX;
    task all = {num_blocks, rank, degree, first, twiddles + num_twiddles, secrets, error, error_bytes, error_row, error_block,
                out, out_row, out_bytes, numbers, (int32_t *)(made + group_doubles), NULL};
    if (out_bytes == PACKED_BYTES && has_lines(&all)) all.waiting = (__m128i *)(all.rows + num_blocks * degree * WIDTH);
    bits seen = {0};
    for (int64_t c = first; c < last; c += WIDTH) {
        int64_t width = MIN(WIDTH, last - c);
        for (int64_t g = 0; g * LANES < width; g++) { /* The transforms of a group are in the cache for all blocks. */
            int64_t from = c + g * LANES, lanes = MIN(LANES, width - g * LANES);
            const double *values = hat ? hat + (from - first) / LANES * group_doubles : made;
            if (!hat && tile) {
                int64_t begin = from / tile * tile, row = PACKED_BYTES * MIN(tile, features - begin);
                const char *at = matrix + PACKED_BYTES * (begin * rank * degree + from - begin);
                transform_columns(at, row, 1, rank, degree, lanes, twiddles, made);
            } else if (!hat) {
                transform_columns(matrix + (from - first) * 4, row_bytes, 0, rank, degree, lanes, twiddles, made);
            }
            for (int64_t b = 0; b < num_blocks; b++)
                seen = combine_lanes(&all, values, secrets + b * rank * half * 2, all.rows + (b * GROUPS + g) * degree * LANES, seen);
        }
        write_width(&all, c, width);
    }
    write_rest(&all, last);
    /* The scratch memory outlives this call, and rows without an error give the secret away. */
    memset(numbers, 0, (size_t)(half * COMPLEX) * sizeof *numbers);
    memset(all.rows, 0, (size_t)(num_blocks * degree * WIDTH) * sizeof *all.rows);
    if (all.waiting) memset(all.waiting, 0, (size_t)(num_blocks * degree * 3) * sizeof *all.waiting);
    _mm_sfence(); /* Threads that are notified after this see the stores that bypassed the caches. */
    return bound(seen);
}
