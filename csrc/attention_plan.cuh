// What the planner writes once a step and every layer's attention reads: who works on which tiles.
//
// The work is a line of units, row after row, head after head, tile after tile; a unit is TILE tokens of one row and one
// "unit head" (a KV head with up to UNIT_HEADS of the query heads that share it). Block c of the persistent grid takes
// units [c * share, (c + 1) * share). The buffer, in int32:
//
//   header   units, share, filled rows, empty rows, 0, 0, 0, 0
//   records  [grid][RECORD]: slot, head, tile, count; row, length, first tile, tiles; block ids of the first STAGES tiles
//   rows     [rows][4]: row, length, first tile, tiles; filled rows from the front in order, empty ones from the back
//   counters [rows][unit heads]: arrivals of split pieces, 0 between launches
#pragma once

#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP  // query heads per KV head
#define GROUP 4
#endif
#ifndef BLOCK_SIZE
#define BLOCK_SIZE 16
#endif
#ifndef WINDOW  // tokens that a query sees, itself included; 0 is all
#define WINDOW 0
#endif
#ifndef SOFTCAP  // 1: logits become softcap * tanh(logit / softcap)
#define SOFTCAP 0
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef CTAS  // per multiprocessor
#define CTAS 2
#endif

constexpr int WARPS = 4;
constexpr int SUB = 16;  // tokens of a tile that one warp reads: never more than one block's
constexpr int TILE = WARPS * SUB;
constexpr int COLUMNS = GROUP <= 8 || HEAD_DIM > 128 ? 1 : 2;  // of 8 query heads each
constexpr int UNIT_HEADS = GROUP < 8 * COLUMNS ? GROUP : 8 * COLUMNS;
constexpr int UNITS_PER_KV_HEAD = (GROUP + UNIT_HEADS - 1) / UNIT_HEADS;

constexpr int HEADER = 8;
constexpr int RECORD = 8 + STAGES * WARPS;

static_assert(BLOCK_SIZE % SUB == 0 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0, "block sizes are 16, 32, 64 or 128");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "head dims are multiples of 32 up to 256");

__host__ __device__ __forceinline__ int first_visible(int length) { return WINDOW > 0 && length > WINDOW ? length - WINDOW : 0; }
