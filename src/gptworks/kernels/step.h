// One decoding step: its inputs, and the functions that trace.cpp calls too.

#pragma once

#include "cached_attention.h"
#include "matrix.h"

namespace [[gnu::visibility("hidden")]] kernels {

// --------------------------------------------------------------------- what structure.py builds (see entries.py)

struct Norm {
    const float *weight, *bias; // weight null: no norm here; bias may be null
    int64_t width;              // elements of each
};

struct Layer {
    Norm norm1, norm2, query_norm, key_norm;
    Norm norm1_after, norm2_after;                 // norms of the results that attention and MLP add to the stream
    Matrix query, key, value, out, gate, up, down; // gate.weight null: the MLP has no gate
    void *keys;                                    // for each slot and group, a HeadCache's keys of `room` positions
    float *key_scales;                             // int8: [slots, groups, room]
    void *values;
    float *value_scales;
    int64_t cache_bytes, scale_bytes; // of `keys` and `values` each; of the scales of each
    int64_t window;                   // keys a query sees, its own included
    int64_t rotates;                  // rotary tables. 0: none; 1: cos and sin; 2: those of windows
};

struct [[gnu::visibility("default")]] Model { // not hidden, since exported functions take it
    int64_t d_model, n_heads, n_groups, d_head, d_ff, d_rotary, n_slots, capacity, n_layers;
    int64_t activation, layer_norm, parallel, cache_kind;
    float eps, scale, embedding_scale, residual_scale, logit_scale, pairs_scale;
    Matrix embedding, head, pairs; // pairs: embeddings of a token and its predecessor; weight null: none
    int32_t *history;              // [n_slots, capacity], the tokens of each slot; null without pairs
    const float *position;         // [capacity, d_model], or null
    const float *cos, *sin;        // [capacity, d_rotary / 2], or null
    const float *window_cos, *window_sin;
    int64_t position_bytes, rotary_bytes, history_bytes;
    Norm norm;
    const Layer *layers;

    int64_t room() const { return (capacity + BLOCK - 1) / BLOCK * BLOCK; } // positions of a slot, in whole blocks
};

// Intermediate values that a step writes. Probabilities of keys that a query does not see are not written: the caller
// sets them to 0.
struct Watched {
    float *stream;    // [2 n_layers + 1, n_rows, d_model]: the embeddings, and after each layer's attention and MLP
    float *attention; // [n_layers, n_heads, n_rows, n_keys]: probabilities
    float *mixed;     // [n_layers, n_rows, n_heads * d_head]: the heads' outputs, before the output projection
    float *neurons;   // [n_layers, n_rows, d_ff]: the inputs of the down projection
    int64_t n_keys;   // a multiple of 32, larger than the last position
};

struct Batch { // the rows of a text are adjacent
    int64_t n_rows, n_texts, n_wanted;
    const int64_t *tokens, *slots, *positions; // of each row
    const int64_t *wanted;                     // [n_wanted], rows whose logits are wanted
    float *logits;                             // [n_wanted, vocabulary]; null: not wanted
    float *features;                           // [n_wanted, d_model], the head's inputs; null: not wanted
    const Watched *watched = nullptr;          // null: no intermediate values are wanted
};

// ------------------------------------------------------------------------------------------------- what is computed

// Writes the first n of the m.k elements of a matrix's row to `out`, as floats.
void read_row(const Matrix &m, int64_t row, int64_t n, float *out);

void normalize(const Norm &norm, bool layer_norm, float eps, int64_t width, const float *x, float *out);

void step(const Model &m, const Batch &b, int64_t n_threads);

// ------------------------------------------------------------------------------------------------- what is refused

void check_model(const Model &m);

// Returns a batch of one or several texts' rows, from int64 tensors [rows]. Refuses rows that do not fit the model.
Batch checked_rows(const Model &m, const Tensor *tokens, const Tensor *slots, const Tensor *positions);

} // namespace kernels
