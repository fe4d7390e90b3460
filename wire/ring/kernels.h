/* What the forms of the product share: kernels.c for AVX2, kernels_vnni.c for AVX-512 with VNNI. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define SKIPPING 2          /* a value of `with_vnni` */
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

/* ---- a few rows: kernels_few.c ---------------------------------------------------------------------------------- */

#define STRIP 64            /* columns of a block: the bytes of a cache line */
#define FIRST_INNER 64      /* inner numbers of the first block, for whose weights a call has to wait */
#define PREFETCH_INNER 16   /* inner numbers that a product in registers takes from one prefetch to the next */
#define LINE 64             /* bytes of a cache line */
#define LONGEST_INNER 128   /* most inner numbers of a block, of both forms */
#define PANEL_BYTES (16 << 10)
#define MOST_FEW_ROWS 96    /* measured: at 96 rows 0.82 to 0.96 of the time of many rows, from some 200 on more */

/* What is to be prefetched: `width` bytes at each of `left` places, `stride` apart, `lines` cache lines at a time. */
typedef struct {
    const int8_t *place;
    int64_t width, stride, left, at, lines;
} ahead_t;

/* Prefetches the next lines into L2: there are too many for L1. */
static inline void prefetch(ahead_t *ahead) {
    for (int64_t n = 0; n < ahead->lines && ahead->left > 0; n++) {
        __builtin_prefetch(ahead->place + ahead->at, 0, 2);
        ahead->at += LINE;
        if (ahead->at >= ahead->width) ahead->place += ahead->stride, ahead->left--, ahead->at = 0;
    }
}

/*
 * A block of the weight, which begins at `w`, and the rows that it is multiplied with. The reply's columns begin at `column`;
 * `is_first` if sums are written and not added to what is there.
 */
typedef struct {
    int32_t *const *replies;
    int64_t count;
    const void *numbers;    /* what `split` made */
    void *panels;           /* memory for the packed block */
    weight_t w;
    int64_t column, columns, inner;
    int is_first;
    ahead_t *ahead;
} block_t;

/* What AVX2 and VNNI do in their own ways. Numbers of a block take 4 bytes each, a panel at most PANEL_BYTES. */
typedef struct {
    int64_t inner;          /* inner numbers of a block */
    int64_t packing_rows;   /* rows that are multiplied while a block is packed */
    int64_t rows, columns;  /* of a product in registers */
    void (*split)(void *numbers, const int32_t *const *rows, int64_t count, int64_t start, int64_t inner);
    void (*multiply)(block_t b);
} few_t;

/* Returns the first address of scratch memory that begins a cache line. */
static inline void *aligned(void *scratch) {
    return (void *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
}

extern const few_t vnni_few;
void multiply_few(product_t p, void *scratch, int with_vnni);
int64_t few_scratch_bytes(int64_t d);

/* ---- kernels.c -------------------------------------------------------------------------------------------------- */

void pack_rows_of_weight(int16_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns);
void pack_columns_of_weight(int16_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns);

/* ---- kernels_rows.c ---------------------------------------------------------------------------------------------- */

void veilbase_pack(const int32_t *rows, int64_t stride, int64_t num_rows, int64_t d, int64_t bits, uint8_t *out);
int64_t veilbase_unpack(const uint8_t *packed, int64_t num_rows, int64_t d, int64_t bits, int32_t *out);

/* ---- kernels_vnni.c --------------------------------------------------------------------------------------------- */

int vnni_usable(void);
int64_t vnni_scratch_bytes(int64_t d);
void vnni_multiply_many(product_t p, void *scratch, int skips);
void vnni_multiply_one_by_rows(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, void *scratch);
void vnni_multiply_one_by_columns(const int32_t *x, int32_t *y, weight_t w, int64_t d, int64_t first, int64_t last, void *scratch);
