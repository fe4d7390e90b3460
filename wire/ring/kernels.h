/* What the forms of the product share: kernels.c for AVX2, kernels_vnni.c for AVX-512 with VNNI. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define BLOCK_ROWS 48       /* rows of a block: a multiple of the rows of a product in registers */
#define BLOCK_COLUMNS 512   /* columns of a block: a multiple of the columns of a product in registers */
#define BLOCK_INNER 1024    /* inner numbers of a block: a multiple of 4 */
#define TOGETHER 4          /* columns that one row is multiplied with at a time */
#define AHEAD 4096          /* bytes to prefetch ahead, the best of 0 to 8192: processors do not predict that the next columns are read */

typedef struct {
    const int8_t *data;
    int64_t row_stride, column_stride;  /* One of them is 1. */
} weight_t;

/* Rows `first_row` to `last_row` by columns `first_column` to `last_column`; see `veilbase_product`. */
typedef struct {
    const int32_t *const *rows;
    int32_t *const *replies;
    weight_t w;
    int64_t d, first_row, last_row, first_column, last_column;
} product_t;

/* Copies what a product in registers left, or adds it where the inner numbers come in several blocks. */
static inline void write_sums(int32_t *reply, const uint32_t *sums, int64_t width, int is_first) {
    uint32_t *to = (uint32_t *)reply;
    if (is_first) for (int64_t j = 0; j < width; j++) to[j] = sums[j];
    else for (int64_t j = 0; j < width; j++) to[j] += sums[j];
}

int vnni_usable(void);
int64_t vnni_scratch_bytes(int64_t d);
void vnni_multiply_many(product_t p, void *scratch);
void vnni_multiply_one_by_rows(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, void *scratch);
void vnni_multiply_one_by_columns(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, void *scratch);
