/*
 * The products of kernels.c for a few rows: too few to pay for packed panels of the whole weight, and enough to share
 * what is read. kernels_few_vnni.c has the inner parts for AVX-512 with VNNI; the order of blocks is here for both.
 *
 * A block of the weight, STRIP columns by a number of inner numbers, is packed into a panel that stays in L1, and then
 * multiplied with all rows. Blocks follow each other in the weight's memory order, and while they are multiplied the
 * following ones are prefetched in that order, a few lines at a time. Both matter: with a weight from memory, blocks taken
 * across that order made 2 rows 2.5 times as slow, and leaving out the prefetch made 16 rows a quarter slower.
 *
 * Constant time in the numbers: no branch and no address depends on one.
 */
#include "kernels.h"

#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define ROWS 3              /* most rows of a product that is held in registers */
#define COLUMNS 16
#define BLOCK_K 128         /* inner numbers of a block: a multiple of 16; 96 and 192 take as long */
#define PLANES (2 * BLOCK_K)  /* halves of a row's numbers in a block: low ones, then high ones */
_Static_assert(BLOCK_K <= LONGEST_INNER && STRIP * BLOCK_K * sizeof(int16_t) <= PANEL_BYTES, "scratch memory is too small");
#define CHUNK 1024          /* columns whose blocks follow each other; their weights and the next ones stay in L2 */

/* ---- AVX2 ------------------------------------------------------------------------------------------------------- */

/* Splits numbers of each row into halves as kernels.c does, and pads them with a zero to a pair. */
AVX2 static void split(void *numbers, const int32_t *const *rows, int64_t count, int64_t start, int64_t inner) {
    int16_t *out = numbers;
    for (int64_t i = 0; i < count; i++, out += PLANES) {
        const int32_t *x = rows[i] + start;
        for (int64_t k = 0; k < inner; k++) out[k] = (int16_t)(uint16_t)x[k];
        for (int64_t k = 0; k < inner; k++) out[BLOCK_K + k] = (int16_t)(uint16_t)(((uint32_t)x[k] + 0x8000) >> 16);
        if (inner % 2) out[inner] = out[BLOCK_K + inner] = 0;
    }
}

/* Packs the same panels as kernels.c, all columns of a strip at a time, so that each cache line is read once. */
AVX2 static void pack_strip(int16_t *out, const int8_t *w, int64_t stride, int64_t inner) {
    int64_t panel = inner * COLUMNS;
    for (int64_t k = 0; k < inner; k += 2, out += 2 * COLUMNS, w += 2 * stride) {
        #pragma GCC unroll 4
        for (int64_t j = 0; j < STRIP / COLUMNS; j++) {
            __m128i a = _mm_loadu_si128((const __m128i *)(w + j * COLUMNS));
            __m128i b = _mm_loadu_si128((const __m128i *)(w + stride + j * COLUMNS));
            __m256i *to = (__m256i *)(out + j * panel);
            _mm256_store_si256(to, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)));
            _mm256_store_si256(to + 1, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)));
        }
    }
}

static void pack(block_t b) {
    if (b.w.column_stride != 1) pack_columns_of_weight(b.panels, b.w.data, b.w.column_stride, b.inner, b.columns);
    else if (b.columns == STRIP && b.inner % 2 == 0) pack_strip(b.panels, b.w.data, b.w.row_stride, b.inner);
    else pack_rows_of_weight(b.panels, b.w.data, b.w.row_stride, b.inner, b.columns);
}

/* Multiplies `count` rows, ROWS or fewer, with panel `c` of COLUMNS columns. */
AVX2 static inline __attribute__((always_inline)) void multiply_panel(block_t b, int64_t row, int64_t c, const int count) {
    const int16_t *numbers = (const int16_t *)b.numbers + row * PLANES;
    const int16_t *panel = (const int16_t *)b.panels + c * ((b.inner + 1) / 2 * 2);
    int64_t width = MIN(COLUMNS, b.columns - c);
    __m256i low[ROWS][2], high[ROWS][2];
    #pragma GCC unroll 3
    for (int r = 0; r < count; r++) low[r][0] = low[r][1] = high[r][0] = high[r][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < b.inner; k += 2, numbers += 2, panel += 2 * COLUMNS) {
        if (k % PREFETCH_INNER == 0) prefetch(b.ahead);
        __m256i left = _mm256_load_si256((const __m256i *)panel), right = _mm256_load_si256((const __m256i *)(panel + COLUMNS));
        #pragma GCC unroll 3
        for (int r = 0; r < count; r++) {
            int32_t pair;
            memcpy(&pair, numbers + r * PLANES, 4);
            __m256i pairs_low = _mm256_set1_epi32(pair);
            memcpy(&pair, numbers + r * PLANES + BLOCK_K, 4);
            __m256i pairs_high = _mm256_set1_epi32(pair);
            low[r][0] = _mm256_add_epi32(low[r][0], _mm256_madd_epi16(pairs_low, left));
            low[r][1] = _mm256_add_epi32(low[r][1], _mm256_madd_epi16(pairs_low, right));
            high[r][0] = _mm256_add_epi32(high[r][0], _mm256_madd_epi16(pairs_high, left));
            high[r][1] = _mm256_add_epi32(high[r][1], _mm256_madd_epi16(pairs_high, right));
        }
    }
    #pragma GCC unroll 3
    for (int r = 0; r < count; r++) {
        uint32_t sums[COLUMNS];
        __m256i *to = (__m256i *)(width < COLUMNS ? (int32_t *)sums : b.replies[row + r] + b.column + c);
        __m256i left = _mm256_add_epi32(low[r][0], _mm256_slli_epi32(high[r][0], 16));
        __m256i right = _mm256_add_epi32(low[r][1], _mm256_slli_epi32(high[r][1], 16));
        if (width == COLUMNS && !b.is_first) {
            left = _mm256_add_epi32(left, _mm256_loadu_si256(to));
            right = _mm256_add_epi32(right, _mm256_loadu_si256(to + 1));
        }
        _mm256_storeu_si256(to, left);
        _mm256_storeu_si256(to + 1, right);
        if (width < COLUMNS) write_sums(b.replies[row + r] + b.column + c, sums, width, b.is_first);
    }
}

AVX2 static void multiply(block_t b) {
    pack(b);
    for (int64_t i = 0; i < b.count; i += ROWS)
        for (int64_t c = 0; c < b.columns; c += COLUMNS)
            if (b.count - i >= 3) multiply_panel(b, i, c, 3);
            else if (b.count - i == 2) multiply_panel(b, i, c, 2);
            else multiply_panel(b, i, c, 1);
}

static const few_t avx2_few = {BLOCK_K, 0, ROWS, COLUMNS, split, multiply};

/* ---- the order of blocks ---------------------------------------------------------------------------------------- */

/* Returns what to prefetch while `tiles` products in registers are made: `width` bytes at each of `left` places. */
static ahead_t ahead_of(const int8_t *place, int64_t width, int64_t stride, int64_t left, int64_t tiles) {
    int64_t lines = left * ((width + LINE - 1) / LINE);
    return (ahead_t){place, width, stride, left, 0, (lines + tiles - 1) / tiles};
}

/* Returns how often `count` rows and a block of so many columns and inner numbers prefetch. */
static int64_t tiles_of(const few_t *form, int64_t count, int64_t columns, int64_t inner) {
    int64_t products = (count + form->rows - 1) / form->rows * ((columns + form->columns - 1) / form->columns);
    return products * ((inner + PREFETCH_INNER - 1) / PREFETCH_INNER);
}

/*
 * Multiplies where a row of the weight is contiguous: all blocks of some rows of the weight, then those of the next rows. The
 * first have few rows, since nothing has prefetched them, and the next twice as many: memory keeps up with that.
 */
static void multiply_by_rows(const few_t *form, product_t p, char *panels, char *numbers) {
    int64_t count = p.last_row - p.first_row, stride = p.w.row_stride;
    for (int64_t first = p.first_column; first < p.last_column; first += CHUNK) {
        int64_t last = MIN(first + CHUNK, p.last_column), inner = MIN(first == p.first_column ? FIRST_INNER : form->inner, p.d), next;
        const int8_t *part = p.w.data + first;
        if (first == p.first_column) {
            ahead_t now = ahead_of(part, last - first, stride, inner, 1);
            prefetch(&now);
        }
        for (int64_t k = 0; k < p.d; k += inner, part += inner * stride, inner = next) {
            int64_t tiles = tiles_of(form, count - form->packing_rows, last - first, inner);
            next = MIN(MIN(2 * inner, form->inner), p.d - k - inner);
            ahead_t ahead = ahead_of(part + inner * stride, last - first, stride, next, tiles);
            if (!next && last < p.last_column)
                ahead = ahead_of(p.w.data + last, MIN(CHUNK, p.last_column - last), stride, MIN(form->inner, p.d), tiles);
            form->split(numbers, p.rows + p.first_row, count, k, inner);
            for (int64_t j = first; j < last; j += STRIP) {
                int64_t columns = MIN(STRIP, last - j);
                weight_t w = {part + (j - first), stride, 1};
                form->multiply((block_t){p.replies + p.first_row, count, numbers, panels, w, j, columns, inner, k == 0, &ahead});
            }
        }
    }
}

/* Multiplies where a column of the weight is contiguous: all blocks of some columns, then those of the next ones. */
static void multiply_by_columns(const few_t *form, product_t p, char *panels, char *numbers) {
    int64_t count = p.last_row - p.first_row, stride = p.w.column_stride, size = count * form->inner * 4;
    int64_t num_blocks = (p.d + form->inner - 1) / form->inner;
    for (int64_t n = 0; n < num_blocks; n++)
        form->split(numbers + n * size, p.rows + p.first_row, count, n * form->inner, MIN(form->inner, p.d - n * form->inner));
    for (int64_t j = p.first_column; j < p.last_column; j += STRIP) {
        int64_t columns = MIN(STRIP, p.last_column - j), tiles = tiles_of(form, count, columns, p.d);
        const int8_t *part = p.w.data + j * stride;
        if (j == p.first_column) {
            ahead_t now = ahead_of(part, p.d, stride, columns, 1);
            prefetch(&now);
        }
        ahead_t ahead = ahead_of(part + columns * stride, p.d, stride, MIN(STRIP, p.last_column - j - columns), tiles);
        for (int64_t n = 0; n < num_blocks; n++) {
            int64_t k = n * form->inner, inner = MIN(form->inner, p.d - k);
            weight_t w = {part + k, 1, stride};
            form->multiply((block_t){p.replies + p.first_row, count, numbers + n * size, panels, w, j, columns, inner, n == 0, &ahead});
        }
    }
}

void multiply_few(product_t p, void *scratch, int with_vnni) {
    const few_t *form = with_vnni ? &vnni_few : &avx2_few;
    char *panels = aligned(scratch), *numbers = panels + PANEL_BYTES;
    if (p.w.column_stride == 1) multiply_by_rows(form, p, panels, numbers);
    else multiply_by_columns(form, p, panels, numbers);
}

int64_t few_scratch_bytes(int64_t d) {
    return PANEL_BYTES + MOST_FEW_ROWS * (d + LONGEST_INNER) * 4;  /* The last block may be as long as the others. */
}
