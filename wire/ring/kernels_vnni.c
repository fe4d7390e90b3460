/*
 * This file computes the products of kernels.c on processors with AVX-512 and VNNI.
 *
 * A number is the four bytes that store it: x = x_0 + 2^8 x_1 + 2^16 x_2 + 2^24 x_3. `vpdpbusd` adds four products of
 * unsigned bytes with int8 weights to each 32-bit lane without saturating, |sum| <= 4 * 255 * 128 at a time, and lanes
 * wrap mod 2^32. Sums of each byte are kept apart until the end, which is exact mod 2^32 in every order. Four such
 * instructions do 64 of the products, as many as four of float32 would: the peak is that of a float32 product.
 *
 * A product of 3 rows and 32 columns holds 24 sums in registers; blocks and panels are those of kernels.c.
 *
 * The code takes constant time: no branch and no address depends on a number, but for `skips`: whether the lowest bytes
 * of a group of rows may be looked at, and be left out if all are zero, as they are in rows of 24 bits.
 */
#include "kernels.h"

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define ROWS 3
#define LANES 16
#define COLUMNS (2 * LANES)
#define QUAD 4                      /* inner numbers that one lane takes at a time */
#define PANEL (QUAD * COLUMNS)      /* bytes of a panel for QUAD inner numbers */
#define STRIP 64                    /* columns that one row is multiplied with at a time, if weights lie in rows */
#define INNER 16                    /* inner numbers taken at a time there: 32 take as long, 8 and 64 a quarter more */

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* Packs weights as panels of COLUMNS columns. A panel has, for each four inner numbers, the four weights of every column. */
static void pack_part(int8_t *out, weight_t w, int64_t inner, int64_t columns) {
    for (int64_t q = 0; q < inner; q += QUAD, out += PANEL)
        for (int64_t c = 0; c < COLUMNS; c++)
            for (int64_t i = 0; i < QUAD; i++)
                out[QUAD * c + i] = c < columns && q + i < inner ? w.data[(q + i) * w.row_stride + c * w.column_stride] : 0;
}

VNNI static void pack_four_rows(int8_t *out, const int8_t *w, int64_t stride) {
    __m128i a = _mm_loadu_si128((const __m128i *)w), b = _mm_loadu_si128((const __m128i *)(w + stride));
    __m128i c = _mm_loadu_si128((const __m128i *)(w + 2 * stride)), d = _mm_loadu_si128((const __m128i *)(w + 3 * stride));
    __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d), *to = (__m128i *)out;
    _mm_storeu_si128(to, _mm_unpacklo_epi16(ab, cd));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(ab, cd));
    ab = _mm_unpackhi_epi8(a, b), cd = _mm_unpackhi_epi8(c, d);
    _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(ab, cd));
    _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(ab, cd));
}

/* Packs 16 weights of each of 4 columns, transposed four at a time. */
VNNI static void pack_four_columns(int8_t *out, const int8_t *w, int64_t stride) {
    __m128i a = _mm_loadu_si128((const __m128i *)w), b = _mm_loadu_si128((const __m128i *)(w + stride));
    __m128i c = _mm_loadu_si128((const __m128i *)(w + 2 * stride)), d = _mm_loadu_si128((const __m128i *)(w + 3 * stride));
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(out + PANEL), _mm_unpackhi_epi64(ab, cd));
    ab = _mm_unpackhi_epi32(a, b), cd = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)(out + 2 * PANEL), _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(out + 3 * PANEL), _mm_unpackhi_epi64(ab, cd));
}

static void pack_weight(int8_t *out, weight_t w, int64_t inner, int64_t columns) {
    int64_t panel = (inner + QUAD - 1) / QUAD * PANEL;
    for (int64_t j = 0; j < columns; j += COLUMNS, out += panel, w.data += COLUMNS * w.column_stride) {
        int64_t k = 0;
        if (columns - j >= COLUMNS) {
            if (w.column_stride == 1)
                for (; k + QUAD <= inner; k += QUAD) {
                    const int8_t *from = w.data + k * w.row_stride;
                    pack_four_rows(out + k / QUAD * PANEL, from, w.row_stride);
                    pack_four_rows(out + k / QUAD * PANEL + PANEL / 2, from + LANES, w.row_stride);
                }
            else
                for (; k + 4 * QUAD <= inner; k += 4 * QUAD)
                    for (int64_t c = 0; c < COLUMNS; c += 4)
                        pack_four_columns(out + k / QUAD * PANEL + c * QUAD, w.data + k + c * w.column_stride, w.column_stride);
        }
        weight_t rest = {w.data + k * w.row_stride, w.row_stride, w.column_stride};
        pack_part(out + k / QUAD * PANEL, rest, inner - k, MIN(COLUMNS, columns - j));
    }
}

/* Returns the lowest bytes of four numbers, then their next ones, up to the highest. */
VNNI static inline __m128i bytes_of_four(__m128i numbers) {
    return _mm_shuffle_epi8(numbers, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

/* Packs numbers in groups of ROWS rows: for each four inner numbers, the four bytes of every row. `low` receives, for each
 * group, whether any of its lowest bytes is not zero. */
VNNI static void pack_numbers(uint32_t *out, uint8_t *low, const int32_t *const *rows, int64_t count, int64_t start, int64_t inner) {
    int64_t quads = (inner + QUAD - 1) / QUAD;
    for (int64_t i = 0; i < count; i += ROWS, out += quads * 4 * ROWS) {
        __m128i seen = _mm_setzero_si128();
        for (int64_t r = 0; r < ROWS; r++) {
            uint32_t *to = out + 4 * r;
            for (int64_t k = 0; k < inner; k += QUAD, to += 4 * ROWS) {
                int64_t left = i + r < count ? MIN(QUAD, inner - k) : 0;
                __mmask8 kept = (__mmask8)((1 << left) - 1);
                __m128i numbers = left ? _mm_maskz_loadu_epi32(kept, rows[i + r] + start + k) : _mm_setzero_si128();
                __m128i bytes = bytes_of_four(numbers);
                seen = _mm_or_si128(seen, bytes);
                _mm_storeu_si128((__m128i *)to, bytes);
            }
        }
        *low++ = _mm_cvtsi128_si32(seen) != 0;
    }
}

/* ---- many rows -------------------------------------------------------------------------------------------------- */

#define SUMS(r, l) __m512i left##r##l = _mm512_setzero_si512(), right##r##l = _mm512_setzero_si512();
#define STEP(r, l) {                                                                                                  \
        __m512i numbers = _mm512_set1_epi32((int32_t)a[4 * r + l]);                                                   \
        left##r##l = _mm512_dpbusd_epi32(left##r##l, numbers, b_left);                                                \
        right##r##l = _mm512_dpbusd_epi32(right##r##l, numbers, b_right);                                             \
    }
#define JOIN(side, r)                                                                                                 \
    _mm512_add_epi32(_mm512_add_epi32(side##r##0, _mm512_slli_epi32(side##r##1, 8)),                                  \
                     _mm512_add_epi32(_mm512_slli_epi32(side##r##2, 16), _mm512_slli_epi32(side##r##3, 24)))
#define JOIN_UPPER(side, r)                                                                                           \
    _mm512_add_epi32(_mm512_slli_epi32(side##r##1, 8),                                                                \
                     _mm512_add_epi32(_mm512_slli_epi32(side##r##2, 16), _mm512_slli_epi32(side##r##3, 24)))
#define WRITE_UPPER(r)                                                                                                \
    _mm512_storeu_si512(sums[r], JOIN_UPPER(left, r));                                                                \
    _mm512_storeu_si512(sums[r] + LANES, JOIN_UPPER(right, r));
#define WRITE(r)                                                                                                      \
    _mm512_storeu_si512(sums[r], JOIN(left, r));                                                                      \
    _mm512_storeu_si512(sums[r] + LANES, JOIN(right, r));
#define UPPER_BYTES(what, r) what(r, 1) what(r, 2) what(r, 3)
#define EACH_BYTE(what, r) what(r, 0) UPPER_BYTES(what, r)

VNNI static void multiply_in_registers(uint32_t sums[ROWS][COLUMNS], const uint32_t *a, const int8_t *b, int64_t quads) {
    EACH_BYTE(SUMS, 0) EACH_BYTE(SUMS, 1) EACH_BYTE(SUMS, 2)
    for (int64_t q = 0; q < quads; q++, a += 4 * ROWS, b += PANEL) {
        __m512i b_left = _mm512_loadu_si512(b), b_right = _mm512_loadu_si512(b + PANEL / 2);
        EACH_BYTE(STEP, 0) EACH_BYTE(STEP, 1) EACH_BYTE(STEP, 2)
    }
    WRITE(0) WRITE(1) WRITE(2)
}

/* Does the same for numbers whose lowest byte is zero, in three quarters of the instructions. */
VNNI static void multiply_upper_in_registers(uint32_t sums[ROWS][COLUMNS], const uint32_t *a, const int8_t *b, int64_t quads) {
    UPPER_BYTES(SUMS, 0) UPPER_BYTES(SUMS, 1) UPPER_BYTES(SUMS, 2)
    for (int64_t q = 0; q < quads; q++, a += 4 * ROWS, b += PANEL) {
        __m512i b_left = _mm512_loadu_si512(b), b_right = _mm512_loadu_si512(b + PANEL / 2);
        UPPER_BYTES(STEP, 0) UPPER_BYTES(STEP, 1) UPPER_BYTES(STEP, 2)
    }
    WRITE_UPPER(0) WRITE_UPPER(1) WRITE_UPPER(2)
}

void vnni_multiply_many(product_t p, void *scratch, int skips) {
    int8_t *panels = scratch;
    uint32_t *numbers = (uint32_t *)(panels + BLOCK_INNER * BLOCK_COLUMNS);
    for (int64_t k = 0; k < p.d; k += BLOCK_INNER) {
        int64_t inner = MIN(BLOCK_INNER, p.d - k), quads = (inner + QUAD - 1) / QUAD;
        for (int64_t j = p.first_column; j < p.last_column; j += BLOCK_COLUMNS) {
            int64_t columns = MIN(BLOCK_COLUMNS, p.last_column - j);
            weight_t part = {p.w.data + k * p.w.row_stride + j * p.w.column_stride, p.w.row_stride, p.w.column_stride};
            pack_weight(panels, part, inner, columns);
            for (int64_t i = p.first_row; i < p.last_row; i += BLOCK_ROWS) {
                int64_t count = MIN(BLOCK_ROWS, p.last_row - i);
                uint8_t low[BLOCK_ROWS / ROWS];
                pack_numbers(numbers, low, p.rows + i, count, k, inner);
                for (int64_t c = 0; c < columns; c += COLUMNS)
                    for (int64_t r = 0; r < count; r += ROWS) {
                        uint32_t sums[ROWS][COLUMNS];
                        (low[r / ROWS] || !skips ? multiply_in_registers : multiply_upper_in_registers)(
                            sums, numbers + r * quads * 4, panels + c * quads * QUAD, quads);
                        for (int64_t n = 0; n < MIN(ROWS, count - r); n++)
                            write_sums(p.replies[i + r + n] + j + c, sums[n], MIN(COLUMNS, columns - c), k == 0);
                    }
            }
        }
    }
}

/* ---- one row ---------------------------------------------------------------------------------------------------- */

/* Multiplies `count` columns, TOGETHER or fewer, with a row given as four rows of bytes, `step` apart and padded with zeros. */
VNNI static inline void multiply_columns(const uint8_t *bytes, int64_t step, int32_t *y, const int8_t *columns, int64_t stride, int64_t d, const int count) {
    __m512i sums[TOGETHER][4];
    #pragma GCC unroll 4
    for (int c = 0; c < count; c++)
        #pragma GCC unroll 4
        for (int l = 0; l < 4; l++) sums[c][l] = _mm512_setzero_si512();
    for (int64_t k = 0; k < d; k += 64, bytes += 64) {
        __mmask64 kept = d - k < 64 ? ((__mmask64)1 << (d - k)) - 1 : ~(__mmask64)0;
        #pragma GCC unroll 4
        for (int c = 0; c < count; c++) {
            _mm_prefetch((const char *)(columns + c * stride + k + AHEAD), _MM_HINT_T0);
            __m512i weights = _mm512_maskz_loadu_epi8(kept, columns + c * stride + k);
            #pragma GCC unroll 4
            for (int l = 0; l < 4; l++) sums[c][l] = _mm512_dpbusd_epi32(sums[c][l], _mm512_loadu_si512(bytes + l * step), weights);
        }
    }
    #pragma GCC unroll 4
    for (int c = 0; c < count; c++) {
        __m512i low = _mm512_add_epi32(sums[c][0], _mm512_slli_epi32(sums[c][1], 8));
        __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[c][2], 16), _mm512_slli_epi32(sums[c][3], 24));
        y[c] = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
}

VNNI void vnni_multiply_one_by_columns(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, void *scratch) {
    uint8_t *bytes = scratch;
    int64_t step = (d + 63) / 64 * 64;
    for (int64_t k = 0; k < step; k += QUAD) {
        int64_t left = d - k < 0 ? 0 : MIN(QUAD, d - k);
        __m128i numbers = left ? _mm_maskz_loadu_epi32((__mmask8)((1 << left) - 1), x + k) : _mm_setzero_si128();
        __m128i four = bytes_of_four(numbers);
        uint32_t parts[4];
        _mm_storeu_si128((__m128i *)parts, four);
        for (int l = 0; l < 4; l++) memcpy(bytes + l * step + k, &parts[l], 4);
    }
    int64_t j = first;
    for (; j + TOGETHER <= last; j += TOGETHER)
        multiply_columns(bytes, step, y + j, w.data + j * w.column_stride, w.column_stride, d, TOGETHER);
    for (; j < last; j++) multiply_columns(bytes, step, y + j, w.data + j * w.column_stride, w.column_stride, d, 1);
}

/* Adds, or writes, the product of INNER or fewer inner numbers and a strip; `bytes` has each byte of four numbers side by side. */
VNNI static inline void multiply_strip(const uint32_t *bytes, int32_t *y, const int8_t *w, int64_t stride, int64_t inner, __mmask64 kept, int is_first) {
    __m512i sums[4][4];     /* one for each byte and quarter of the strip */
    #pragma GCC unroll 4
    for (int l = 0; l < 4; l++)
        #pragma GCC unroll 4
        for (int p = 0; p < 4; p++) sums[l][p] = _mm512_setzero_si512();
    for (int64_t q = 0; q < inner; q += QUAD, bytes += 4) {
        __m512i rows[QUAD], quads[4];
        #pragma GCC unroll 4
        for (int64_t i = 0; i < QUAD; i++) {
            const int8_t *row = w + MIN(q + i, inner - 1) * stride;     /* Past the last number, bytes are zeros. */
            _mm_prefetch((const char *)(row + INNER * stride), _MM_HINT_T1);
            rows[i] = _mm512_maskz_loadu_epi8(kept, row);
        }
        __m512i ab = _mm512_unpacklo_epi8(rows[0], rows[1]), cd = _mm512_unpacklo_epi8(rows[2], rows[3]);
        quads[0] = _mm512_unpacklo_epi16(ab, cd), quads[1] = _mm512_unpackhi_epi16(ab, cd);
        ab = _mm512_unpackhi_epi8(rows[0], rows[1]), cd = _mm512_unpackhi_epi8(rows[2], rows[3]);
        quads[2] = _mm512_unpacklo_epi16(ab, cd), quads[3] = _mm512_unpackhi_epi16(ab, cd);
        #pragma GCC unroll 4
        for (int l = 0; l < 4; l++) {
            __m512i numbers = _mm512_set1_epi32((int32_t)bytes[l]);
            #pragma GCC unroll 4
            for (int p = 0; p < 4; p++) sums[l][p] = _mm512_dpbusd_epi32(sums[l][p], numbers, quads[p]);
        }
    }
    __m512i found[4];
    #pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        __m512i low = _mm512_add_epi32(sums[0][p], _mm512_slli_epi32(sums[1][p], 8));
        __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[2][p], 16), _mm512_slli_epi32(sums[3][p], 24));
        found[p] = _mm512_add_epi32(low, high);
    }
    /* found[p] has columns 4p to 4p + 3 of each sixteen. */
    __m512i left = _mm512_shuffle_i32x4(found[0], found[1], 0x44), right = _mm512_shuffle_i32x4(found[2], found[3], 0x44);
    __m512i ordered[4] = {_mm512_shuffle_i32x4(left, right, 0x88), _mm512_shuffle_i32x4(left, right, 0xdd)};
    left = _mm512_shuffle_i32x4(found[0], found[1], 0xee), right = _mm512_shuffle_i32x4(found[2], found[3], 0xee);
    ordered[2] = _mm512_shuffle_i32x4(left, right, 0x88), ordered[3] = _mm512_shuffle_i32x4(left, right, 0xdd);
    #pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        __mmask16 mask = (__mmask16)(kept >> (LANES * g));
        if (!is_first) ordered[g] = _mm512_add_epi32(ordered[g], _mm512_maskz_loadu_epi32(mask, y + LANES * g));
        _mm512_mask_storeu_epi32(y + LANES * g, mask, ordered[g]);
    }
}

VNNI void vnni_multiply_one_by_rows(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, void *scratch) {
    uint32_t *bytes = scratch;
    for (int64_t k = 0; k < d; k += QUAD) {
        __m128i numbers = _mm_maskz_loadu_epi32((__mmask8)((1 << MIN(QUAD, d - k)) - 1), x + k);
        _mm_storeu_si128((__m128i *)(bytes + k), bytes_of_four(numbers));
    }
    for (int64_t k = 0; k < d; k += INNER)
        for (int64_t j = first; j < last; j += STRIP) {
            __mmask64 kept = last - j < STRIP ? ((__mmask64)1 << (last - j)) - 1 : ~(__mmask64)0;
            multiply_strip(bytes + k, y + j, w.data + k * w.row_stride + j, w.row_stride, MIN(INNER, d - k), kept, k == 0);
        }
}

/* ---- what kernels.c asks ---------------------------------------------------------------------------------------- */

/* Tells whether processor and operating system have what this file needs; the caller has found AVX and OSXSAVE. */
int vnni_usable(void) {
    unsigned a, b, c, d, low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0xe6) != 0xe6) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512VL) && (c & bit_AVX512VNNI);
}

int64_t vnni_scratch_bytes(int64_t d) {
    int64_t many = BLOCK_INNER * BLOCK_COLUMNS + BLOCK_ROWS * BLOCK_INNER * 4;
    int64_t one = 4 * ((d + 63) / 64 * 64);
    return many > one ? many : one;
}
