/*
 * Products mod 2^32 of int32 rows and int8 weights on x86-64 with AVX2; kernels_vnni.c has what AVX-512 does better.
 * wire/ring/kernels.py is the only caller and checks every shape and pointer; wire/ring/product.py says what these numbers mean.
 *
 * A number is split into two 16-bit halves, x = low + 2^16 * high mod 2^32, with low taken as signed. Two neighbouring
 * products of a half with an int8 weight are one lane of `pmaddwd`, which cannot saturate: |sum| <= 2 * 2^15 * 2^7. All
 * sums are 32-bit lanes that wrap mod 2^32, which is the ring's own rule, so every order of summing is exact.
 *
 * The blocked product follows Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS
 * 2008: a packed panel of the weight stays in L1 while a packed block of rows streams from L2. A product of 3 rows and
 * 16 columns holds 12 sums in registers. On Zen 3, whose 256-bit units take two multiplications and two additions a
 * cycle, its peak is that of float32; float64, the other exact way, has half.
 *
 * Constant time in the numbers: no branch and no address depends on one.
 */
#include "kernels.h"

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define ROWS 3              /* rows of a product that is held in registers */
#define COLUMNS 16

/* Returns the low halves of two neighbouring numbers, as `pmaddwd` takes them; high_pair returns the high ones. */
static inline uint32_t low_pair(uint32_t first, uint32_t second) {
    return (first & 0xffff) | (second << 16);
}

static inline uint32_t high_pair(uint32_t first, uint32_t second) {
    /* The low half is signed, so a number whose low half is negative has one more in its high half. */
    return ((first + 0x8000) >> 16) | ((second + 0x8000) & 0xffff0000u);
}

AVX2 static inline void store_widened(int16_t *out, __m128i bytes) {
    _mm256_storeu_si256((__m256i *)out, _mm256_cvtepi8_epi16(bytes));
}

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* Packs weights as panels of COLUMNS columns. A panel has, for each two inner numbers, the two weights of every column. */
AVX2 void pack_rows_of_weight(int16_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns) {
    for (int64_t j = 0; j < columns; j += COLUMNS) {
        size_t width = columns - j < COLUMNS ? columns - j : COLUMNS;
        for (int64_t k = 0; k < inner; k += 2, out += 2 * COLUMNS) {
            int8_t copy[2][COLUMNS] = {{0}};
            const int8_t *first = w + k * stride + j, *second = k + 1 < inner ? first + stride : copy[1];
            if (width < COLUMNS) {
                memcpy(copy[0], first, width);
                memcpy(copy[1], second, width);
                first = copy[0], second = copy[1];
            }
            __m128i a = _mm_loadu_si128((const __m128i *)first), b = _mm_loadu_si128((const __m128i *)second);
            store_widened(out, _mm_unpacklo_epi8(a, b));
            store_widened(out + COLUMNS, _mm_unpackhi_epi8(a, b));
        }
    }
}

/* Packs 16 weights of each of 8 columns, transposed as pairs and widened: 8 pieces of half a panel's width. */
AVX2 static void pack_eight_columns(int16_t *out, const int8_t *w, int64_t stride) {
    __m128i in[8], a[8], b[8];
    for (int c = 0; c < 8; c++) in[c] = _mm_loadu_si128((const __m128i *)(w + c * stride));
    for (int c = 0; c < 4; c++) {
        a[2 * c] = _mm_unpacklo_epi16(in[2 * c], in[2 * c + 1]);
        a[2 * c + 1] = _mm_unpackhi_epi16(in[2 * c], in[2 * c + 1]);
    }
    for (int h = 0; h < 2; h++)
        for (int c = 0; c < 2; c++) {
            b[4 * h + 2 * c] = _mm_unpacklo_epi32(a[4 * h + c], a[4 * h + 2 + c]);
            b[4 * h + 2 * c + 1] = _mm_unpackhi_epi32(a[4 * h + c], a[4 * h + 2 + c]);
        }
    for (int p = 0; p < 4; p++) {
        store_widened(out + 2 * p * 2 * COLUMNS, _mm_unpacklo_epi64(b[p], b[4 + p]));
        store_widened(out + (2 * p + 1) * 2 * COLUMNS, _mm_unpackhi_epi64(b[p], b[4 + p]));
    }
}

/* Packs the same panels from weights whose columns are contiguous. */
AVX2 void pack_columns_of_weight(int16_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns) {
    int64_t panel = (inner + 1) / 2 * 2 * COLUMNS;
    for (int64_t j = 0; j < columns; j += 8) {
        int16_t *to = out + j / COLUMNS * panel + j % COLUMNS * 2;
        const int8_t *from = w + j * stride;
        int64_t width = columns - j < 8 ? columns - j : 8, k = 0;
        if (width == 8)
            for (; k + 16 <= inner; k += 16) pack_eight_columns(to + k * COLUMNS, from + k, stride);
        for (; k < inner; k += 2)
            for (int64_t c = 0; c < 8; c++) {
                to[k * COLUMNS + 2 * c] = c < width ? from[c * stride + k] : 0;
                to[k * COLUMNS + 2 * c + 1] = c < width && k + 1 < inner ? from[c * stride + k + 1] : 0;
            }
        if (columns - j <= 8 && j % COLUMNS == 0)  /* Half a panel is left over. */
            for (k = 0; k < inner; k += 2) memset(to + k * COLUMNS + COLUMNS, 0, 2 * COLUMNS);
    }
}

/* Packs numbers in groups of ROWS rows: for each two inner numbers, the low halves of every row, then the high ones. */
static void pack_numbers(uint32_t *out, const int32_t *const *rows, int64_t count, int64_t start, int64_t inner) {
    int64_t pairs = (inner + 1) / 2;
    for (int64_t i = 0; i < count; i += ROWS, out += pairs * 2 * ROWS)
        for (int64_t r = 0; r < ROWS; r++) {
            uint32_t *to = out + r;
            if (i + r >= count) {
                for (int64_t p = 0; p < pairs; p++) to[p * 2 * ROWS] = to[p * 2 * ROWS + ROWS] = 0;
                continue;
            }
            const int32_t *row = rows[i + r] + start;
            for (int64_t p = 0; p < pairs; p++, to += 2 * ROWS) {
                uint32_t a = (uint32_t)row[2 * p], b = 2 * p + 1 < inner ? (uint32_t)row[2 * p + 1] : 0;
                to[0] = low_pair(a, b);
                to[ROWS] = high_pair(a, b);
            }
        }
}

/* ---- many rows -------------------------------------------------------------------------------------------------- */

#define SUMS(r) __m256i left##r = _mm256_setzero_si256(), right##r = _mm256_setzero_si256();
#define STEP(r) {                                                                                                     \
        __m256i numbers = _mm256_set1_epi32((int32_t)a[r]);                                                           \
        left##r = _mm256_add_epi32(left##r, _mm256_madd_epi16(numbers, b_left));                                      \
        right##r = _mm256_add_epi32(right##r, _mm256_madd_epi16(numbers, b_right));                                   \
    }
#define JOIN(low, high)                                                                                               \
    _mm256_storeu_si256((__m256i *)sums[low], _mm256_add_epi32(left##low, _mm256_slli_epi32(left##high, 16)));        \
    _mm256_storeu_si256((__m256i *)(sums[low] + 8), _mm256_add_epi32(right##low, _mm256_slli_epi32(right##high, 16)));

AVX2 static void multiply_in_registers(uint32_t sums[ROWS][COLUMNS], const uint32_t *a, const int16_t *b, int64_t pairs) {
    SUMS(0) SUMS(1) SUMS(2) SUMS(3) SUMS(4) SUMS(5)
    for (int64_t p = 0; p < pairs; p++, a += 2 * ROWS, b += 2 * COLUMNS) {
        __m256i b_left = _mm256_loadu_si256((const __m256i *)b);
        __m256i b_right = _mm256_loadu_si256((const __m256i *)(b + COLUMNS));
        STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5)
    }
    JOIN(0, 3) JOIN(1, 4) JOIN(2, 5)
}

static void multiply_many(product_t p, char *scratch) {
    int16_t *panels = (int16_t *)scratch;
    uint32_t *numbers = (uint32_t *)(scratch + BLOCK_INNER * BLOCK_COLUMNS * sizeof(int16_t));
    for (int64_t k = 0; k < p.d; k += BLOCK_INNER) {
        int64_t inner = MIN(BLOCK_INNER, p.d - k), pairs = (inner + 1) / 2;
        for (int64_t j = p.first_column; j < p.last_column; j += BLOCK_COLUMNS) {
            int64_t columns = MIN(BLOCK_COLUMNS, p.last_column - j);
            const int8_t *part = p.w.data + k * p.w.row_stride + j * p.w.column_stride;
            if (p.w.column_stride == 1) pack_rows_of_weight(panels, part, p.w.row_stride, inner, columns);
            else pack_columns_of_weight(panels, part, p.w.column_stride, inner, columns);
            for (int64_t i = p.first_row; i < p.last_row; i += BLOCK_ROWS) {
                int64_t count = MIN(BLOCK_ROWS, p.last_row - i);
                pack_numbers(numbers, p.rows + i, count, k, inner);
                for (int64_t c = 0; c < columns; c += COLUMNS)
                    for (int64_t r = 0; r < count; r += ROWS) {
                        uint32_t sums[ROWS][COLUMNS];
                        multiply_in_registers(sums, numbers + r * pairs * 2, panels + c * pairs * 2, pairs);
                        for (int64_t n = 0; n < MIN(ROWS, count - r); n++)
                            write_sums(p.replies[i + r + n] + j + c, sums[n], MIN(COLUMNS, columns - c), k == 0);
                    }
            }
        }
    }
}

/* ---- one row ---------------------------------------------------------------------------------------------------- */

/* Multiplies one row with eight rows of the weight at a time, all their columns. Sums go to the reply, which stays in L1. */
AVX2 static void multiply_one_by_rows(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last) {
    memset(y + first, 0, (size_t)(last - first) * 4);
    for (int64_t k = 0; k < d; k += 8) {
        uint32_t number[8], low[4], high[4];
        const int8_t *row[8];
        for (int64_t i = 0; i < 8; i++) {
            number[i] = k + i < d ? (uint32_t)x[k + i] : 0;
            row[i] = w.data + MIN(k + i, d - 1) * w.row_stride;
        }
        for (int p = 0; p < 4; p++) {
            low[p] = low_pair(number[2 * p], number[2 * p + 1]);
            high[p] = high_pair(number[2 * p], number[2 * p + 1]);
        }
        /* Processors do not predict eight streams that end after a few hundred bytes: with this prefetch it took half the time. */
        const char *next = (const char *)w.data + (k + 8 < d ? k + 8 : 0) * w.row_stride + 8 * first;
        int64_t j = first;
        for (; j + 16 <= last; j += 16, next += 128) {
            _mm_prefetch(next, _MM_HINT_T0);
            _mm_prefetch(next + 64, _MM_HINT_T0);
            __m256i low_left = _mm256_setzero_si256(), low_right = low_left, high_left = low_left, high_right = low_left;
            #pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                __m128i a = _mm_loadu_si128((const __m128i *)(row[2 * p] + j));
                __m128i b = _mm_loadu_si128((const __m128i *)(row[2 * p + 1] + j));
                __m256i left = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
                __m256i right = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
                __m256i lows = _mm256_set1_epi32((int32_t)low[p]), highs = _mm256_set1_epi32((int32_t)high[p]);
                low_left = _mm256_add_epi32(low_left, _mm256_madd_epi16(lows, left));
                low_right = _mm256_add_epi32(low_right, _mm256_madd_epi16(lows, right));
                high_left = _mm256_add_epi32(high_left, _mm256_madd_epi16(highs, left));
                high_right = _mm256_add_epi32(high_right, _mm256_madd_epi16(highs, right));
            }
            __m256i *to = (__m256i *)(y + j);
            __m256i left = _mm256_add_epi32(low_left, _mm256_slli_epi32(high_left, 16));
            __m256i right = _mm256_add_epi32(low_right, _mm256_slli_epi32(high_right, 16));
            _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), left));
            _mm256_storeu_si256(to + 1, _mm256_add_epi32(_mm256_loadu_si256(to + 1), right));
        }
        for (; j < last; j++) {
            uint32_t sum = (uint32_t)y[j];
            for (int i = 0; i < 8; i++) sum += number[i] * (uint32_t)(int32_t)row[i][j];
            y[j] = (int32_t)sum;
        }
    }
}

/* Multiplies one row with `count` columns, TOGETHER or fewer, and reads the halves of the row once for all of them. */
AVX2 static inline void multiply_columns(const int32_t *x, const int16_t *low, const int16_t *high, int32_t *y,
                                         const int8_t *columns, int64_t stride, int64_t d, const int count) {
    __m256i lows[TOGETHER], highs[TOGETHER];
    #pragma GCC unroll 4
    for (int c = 0; c < count; c++) lows[c] = highs[c] = _mm256_setzero_si256();
    int64_t k = 0;
    for (; k + 16 <= d; k += 16) {
        __m256i low_numbers = _mm256_loadu_si256((const __m256i *)(low + k));
        __m256i high_numbers = _mm256_loadu_si256((const __m256i *)(high + k));
        #pragma GCC unroll 4
        for (int c = 0; c < count; c++) {
            const int8_t *from = columns + c * stride + k;
            if (k % 64 == 0) _mm_prefetch((const char *)(from + AHEAD), _MM_HINT_T0);
            __m256i weights = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
            lows[c] = _mm256_add_epi32(lows[c], _mm256_madd_epi16(weights, low_numbers));
            highs[c] = _mm256_add_epi32(highs[c], _mm256_madd_epi16(weights, high_numbers));
        }
    }
    #pragma GCC unroll 4
    for (int c = 0; c < count; c++) {
        uint32_t lanes[8], sum = 0;
        _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi32(lows[c], _mm256_slli_epi32(highs[c], 16)));
        for (int i = 0; i < 8; i++) sum += lanes[i];
        for (int64_t i = k; i < d; i++) sum += (uint32_t)x[i] * (uint32_t)(int32_t)columns[c * stride + i];
        y[c] = (int32_t)sum;
    }
}

AVX2 static void multiply_one_by_columns(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, char *scratch) {
    int16_t *low = (int16_t *)scratch, *high = low + d;
    for (int64_t k = 0; k < d; k++) {
        low[k] = (int16_t)(uint16_t)x[k];
        high[k] = (int16_t)(uint16_t)(((uint32_t)x[k] + 0x8000) >> 16);
    }
    int64_t j = first;
    for (; j + TOGETHER <= last; j += TOGETHER)
        multiply_columns(x, low, high, y + j, w.data + j * w.column_stride, w.column_stride, d, TOGETHER);
    for (; j < last; j++) multiply_columns(x, low, high, y + j, w.data + j * w.column_stride, w.column_stride, d, 1);
}

/* ---- what wire/ring/kernels.py calls --------------------------------------------------------------------------------- */

/* Tells whether processor and operating system have what the rest of this file needs: AVX2, and its registers saved. */
int veilbase_usable(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}

/* Tells whether kernels_vnni.c can be used too. */
int veilbase_has_vnni(void) {
    return veilbase_usable() && vnni_usable();
}

/* Returns the version of these functions' signatures. It grows by one with every change of them, here and in kernels.py. */
int veilbase_kernels_version(void) {
    return 9;
}

/* Returns the bytes of scratch memory that `veilbase_product` needs for rows of d numbers. */
int64_t veilbase_scratch_bytes(int64_t d) {
    int64_t many = BLOCK_INNER * BLOCK_COLUMNS * (int64_t)sizeof(int16_t) + BLOCK_ROWS * BLOCK_INNER * 4;
    int64_t one = 4 * d, wide = vnni_scratch_bytes(d);
    int64_t least = many > one ? many : one, few = few_scratch_bytes(d);
    if (least < few) least = few;
    return 64 + (least > wide ? least : wide);  /* `aligned` skips up to 63 bytes. */
}

/*
 * Computes some columns of the product of some rows.
 *
 * rows, replies: for each row, where its d numbers and its reply begin, both contiguous; no two overlap.
 * weight: the first number of a d x m matrix, one of whose strides is 1.
 * scratch: see `veilbase_scratch_bytes`. with_vnni: whether to use kernels_vnni.c, if `veilbase_has_vnni`;
 * SKIPPING if it may leave out lowest bytes that are zero, which takes less time then.
 */
void veilbase_product(const int32_t *const *rows, int32_t *const *replies, int64_t first_row, int64_t last_row,
                      const int8_t *weight, int64_t row_stride, int64_t column_stride, int64_t d,
                      int64_t first_column, int64_t last_column, void *scratch, int with_vnni) {
    weight_t w = {weight, row_stride, column_stride};
    if (d == 0) {
        for (int64_t i = first_row; i < last_row; i++)
            memset(replies[i] + first_column, 0, (size_t)(last_column - first_column) * 4);
        return;
    }
    if (last_row - first_row > 1) {
        product_t p = {rows, replies, w, d, first_row, last_row, first_column, last_column};
        if (last_row - first_row <= MOST_FEW_ROWS) multiply_few(p, scratch, with_vnni);
        else if (with_vnni) vnni_multiply_many(p, scratch, with_vnni == SKIPPING);
        else multiply_many(p, scratch);
        return;
    }
    for (int64_t i = first_row; i < last_row; i++) {
        if (column_stride == 1 && with_vnni) vnni_multiply_one_by_rows(rows[i], replies[i], w, d, first_column, last_column, scratch);
        else if (column_stride == 1) multiply_one_by_rows(rows[i], replies[i], w, d, first_column, last_column);
        else if (with_vnni) vnni_multiply_one_by_columns(rows[i], replies[i], w, d, first_column, last_column, scratch);
        else multiply_one_by_columns(rows[i], replies[i], w, d, first_column, last_column, scratch);
    }
}

/*
 * Computes the whole product of MOST_FEW_ROWS or fewer rows. Their numbers begin `step` numbers after each other, and
 * their replies of m numbers follow each other. Everything else is as above.
 */
void veilbase_few_product(const int32_t *rows, int64_t step, int32_t *replies, int64_t num_rows, const int8_t *weight,
                          int64_t row_stride, int64_t column_stride, int64_t d, int64_t m, void *scratch, int with_vnni) {
    const int32_t *starts[MOST_FEW_ROWS];
    int32_t *ends[MOST_FEW_ROWS];
    for (int64_t i = 0; i < MIN(num_rows, MOST_FEW_ROWS); i++) starts[i] = rows + i * step, ends[i] = replies + i * m;
    veilbase_product(starts, ends, 0, MIN(num_rows, MOST_FEW_ROWS), weight, row_stride, column_stride, d, 0, m, scratch, with_vnni);
}

/*
 * Computes the whole product of one row that is packed, and packs it; see kernels_rows.c. At 32 bits numbers are as they are.
 *
 * row, reply: of d numbers of `bits` bits and of m of `reply_bits` bits, at any addresses. numbers: memory for d + m numbers.
 * Returns what `veilbase_unpack` returns: zero if the row ends with zero bits. Otherwise nothing is computed.
 */
int64_t veilbase_packed_row_product(const uint8_t *row, int64_t bits, uint8_t *reply, int64_t reply_bits, int32_t *numbers,
                                    const int8_t *weight, int64_t row_stride, int64_t column_stride, int64_t d, int64_t m,
                                    void *scratch, int with_vnni) {
    int32_t *product = numbers + d;
    const int32_t *start = numbers;
    if (bits == 32) memcpy(numbers, row, (size_t)d * 4);
    else if (veilbase_unpack(row, 1, d, bits, numbers)) return 1;
    veilbase_product(&start, &product, 0, 1, weight, row_stride, column_stride, d, 0, m, scratch, with_vnni);
    if (reply_bits == 32) memcpy(reply, product, (size_t)m * 4);
    else veilbase_pack(product, m, 1, m, reply_bits, reply);
    return 0;
}

/* Returns the most rows that `veilbase_few_product` takes. */
int64_t veilbase_most_few_rows(void) {
    return MOST_FEW_ROWS;
}
