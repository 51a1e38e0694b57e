/* Sequential heads on a CPU, all of them along the likeliest paths, in one call.
 *
 * What the torch modules of heads/model.py compute in some twenty operations a head, done in
 * one. After a pass of the target the caches hold the target, so that each operation of torch
 * costs tens of microseconds before it does anything; and the weights, read once per head,
 * are int8 with one scale per row, which is a draft's precision and half of bfloat16's bytes.
 * What they are multiplied with is int16, also with a scale per row: sums of integers may be
 * made in any order, so that compilers vectorize them, and do not depend on it.
 *
 * Plain C with OpenMP, called from cpu/head_chain.py, which describes the arguments. Nothing
 * here is allocated. Results do not depend on the number of threads: sums over the vocabulary
 * are made by CHUNKS of it, whoever adds which up.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ROWS = 32, TOP = 8, BEAM_WIDTH = 2, CHUNKS = 64 };

/* Below the likeliest token by this much in log-probability, a token's noise is not looked at:
 * one in e^REACH tokens would have the luck to come. */
static const float REACH = 11.0f;

/* A linear layer without bias: outputs[o] = scale[o] * sum_i weight[o][i] * inputs[i]. */
typedef struct {
    const int8_t *weight; /* [outputs][inputs] */
    const float *scale;   /* [outputs] */
    int32_t inputs, outputs;
} Linear;

typedef struct {
    const float *state_norm, *token_norm, *read_norm; /* [hidden] */
    Linear up, down;
    float eps;
} Head;

typedef struct {
    const Head *heads; /* [num_heads] */
    Linear lm;         /* hidden -> the heads' vocabulary */
    const uint16_t *embeddings; /* bfloat16 [vocabulary][hidden] */
    const int32_t *tokens;      /* [vocabulary], their ids */
    int32_t num_heads;
} Chain;

/* A request's constraints and noise. */
typedef struct {
    const uint8_t *in_window;            /* [vocabulary], 1 for the penalty's tokens */
    float outside, positive, negative;   /* what logits are multiplied by: of others, of these */
    const uint64_t *keys; /* [num_heads]: of the noise at the position of each head's token */
    float noise_power;    /* how far the noise counts, 0 where nothing is known of it */
} Request;

/* A path that a head goes on from, and what it found below. */
typedef struct {
    int32_t request, above, place; /* above: row of the level above, place: which of its tokens */
    float chance;
    int32_t tokens[TOP], places[TOP]; /* ids, and where they stand in the vocabulary */
    float chances[TOP];
} Row;

typedef struct {
    float value;
    int32_t index;
} Entry;

/* The code is compiled for several generations of x86 and chosen at load. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU __attribute__((noinline))
#endif

/* inputs[i] ~ *scale * rounded[i], as finely as the sums of a row have room for. */
static void round_inputs(const float *inputs, int n, int16_t *rounded, float *scale) {
    float largest = 1e-12f;
    for (int i = 0; i < n; i++)
        if (fabsf(inputs[i]) > largest) largest = fabsf(inputs[i]);
    const int room = INT32_MAX / (127 * n);
    const float steps = (float)(room < INT16_MAX ? room : INT16_MAX) / largest;
    for (int i = 0; i < n; i++) rounded[i] = (int16_t)lrintf(inputs[i] * steps);
    *scale = 1.0f / steps;
}

/* Outputs first..last of a layer, for one input. Four at a time share the reading of it. */
FOR_EACH_CPU static void linear_rows(const Linear *layer, const int16_t *inputs, float scale,
                                     float *outputs, int first, int last) {
    const int n = layer->inputs;
    int o = first;
    for (; o + 4 <= last; o += 4) {
        const int8_t *a = layer->weight + (size_t)o * n, *b = a + n, *c = b + n, *d = c + n;
        int32_t sa = 0, sb = 0, sc = 0, sd = 0;
        for (int i = 0; i < n; i++) {
            sa += inputs[i] * a[i];
            sb += inputs[i] * b[i];
            sc += inputs[i] * c[i];
            sd += inputs[i] * d[i];
        }
        outputs[o] = (float)sa * (scale * layer->scale[o]);
        outputs[o + 1] = (float)sb * (scale * layer->scale[o + 1]);
        outputs[o + 2] = (float)sc * (scale * layer->scale[o + 2]);
        outputs[o + 3] = (float)sd * (scale * layer->scale[o + 3]);
    }
    for (; o < last; o++) {
        const int8_t *a = layer->weight + (size_t)o * n;
        int32_t sum = 0;
        for (int i = 0; i < n; i++) sum += inputs[i] * a[i];
        outputs[o] = (float)sum * (scale * layer->scale[o]);
    }
}

/* A thread's share. Blocks of the weights stay in the first cache while each input of the
 * batch passes over them. */
static void linear_part(const Linear *layer, const int16_t *inputs, const float *scales,
                        float *outputs, int rows, int thread, int threads) {
    const int block = 16;
    const int blocks = (layer->outputs + block - 1) / block;
    const int first = (int)((int64_t)blocks * thread / threads) * block;
    int end = (int)((int64_t)blocks * (thread + 1) / threads) * block;
    if (end > layer->outputs) end = layer->outputs;
    for (int o = first; o < end; o += block) {
        const int last = o + block < end ? o + block : end;
        for (int r = 0; r < rows; r++)
            linear_rows(layer, inputs + (size_t)r * layer->inputs, scales[r],
                        outputs + (size_t)r * layer->outputs, o, last);
    }
}

/* In place, too. */
static void norm(const float *inputs, const float *weight, float eps, int n, float *outputs) {
    float squares = 0;
    for (int i = 0; i < n; i++) squares += inputs[i] * inputs[i];
    const float scale = 1.0f / sqrtf(squares / (float)n + eps);
    for (int i = 0; i < n; i++) outputs[i] = inputs[i] * scale * weight[i];
}

static float of_bfloat16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Keeps the TOP largest, largest first; of equals the one that came first. */
static void keep(Entry *top, float value, int32_t index) {
    int place = TOP - 1;
    while (place > 0 && top[place - 1].value < value) {
        top[place] = top[place - 1];
        place--;
    }
    top[place].value = value;
    top[place].index = index;
}

static uint64_t splitmix64(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

/* Logarithm of a token's exponential noise, as drafting has it; key: SeedDraws.key_at. */
static float log_noise(uint64_t key, int32_t token) {
    const uint64_t bits = splitmix64(key + ((uint64_t)token + 1) * 0x9E3779B97F4A7C15u) >> 11;
    return (float)log(-log(((double)bits + 0.5) * 0x1p-53));
}

/* What was found in a chunk of a row. */
typedef struct {
    Entry top[TOP];
    float largest, sum;
} Found;

static int start_of(int chunk, int vocabulary) {
    return (int)((int64_t)vocabulary * chunk / CHUNKS);
}

static float largest_of(Found (*found)[MAX_ROWS], int row) {
    float largest = -INFINITY;
    for (int c = 0; c < CHUNKS; c++)
        if (found[c][row].largest > largest) largest = found[c][row].largest;
    return largest;
}

/* One head below all paths: new_states, and of each row the tokens and their chances.
 * states, embedded: by row, where they lie. work: see tokenswift_descend. */
static void pass(const Chain *chain, int level, const Request *requests, int num_rows, Row *rows,
                 const float *const *states, const uint16_t *const *embedded, float *work,
                 float *new_states) {
    const Head *head = &chain->heads[level];
    const Linear *lm = &chain->lm;
    const int hidden = head->down.outputs, width = head->up.outputs, vocabulary = lm->outputs;
    float *both = work;                              /* [2 * hidden], of one row */
    float *wide = both + 2 * hidden;                 /* [rows][width] */
    float *logits = wide + (size_t)num_rows * width; /* [rows][vocabulary] */
    /* [rows][inputs of the layer], of one layer after the other */
    int16_t *rounded = (int16_t *)(logits + (size_t)num_rows * vocabulary);
    float steps[MAX_ROWS]; /* of the rounded inputs */
    Found found[CHUNKS][MAX_ROWS];

#pragma omp parallel
    {
        const int thread = omp_get_thread_num(), size = omp_get_num_threads();
#pragma omp single
        for (int r = 0; r < num_rows; r++) {
            float *token = both + hidden;
            norm(states[r], head->state_norm, head->eps, hidden, both);
            for (int i = 0; i < hidden; i++) token[i] = of_bfloat16(embedded[r][i]);
            norm(token, head->token_norm, head->eps, hidden, token);
            round_inputs(both, 2 * hidden, rounded + (size_t)r * 2 * hidden, &steps[r]);
        } /* implied barrier */
        linear_part(&head->up, rounded, steps, wide, num_rows, thread, size);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int i = 0; i < num_rows * width; i++) wide[i] = wide[i] / (1.0f + expf(-wide[i]));
#pragma omp single
        for (int r = 0; r < num_rows; r++)
            round_inputs(wide + (size_t)r * width, width, rounded + (size_t)r * width, &steps[r]);
        linear_part(&head->down, rounded, steps, new_states, num_rows, thread, size);
#pragma omp barrier
#pragma omp single
        for (int r = 0; r < num_rows; r++) {
            float *state = new_states + (size_t)r * hidden;
            for (int i = 0; i < hidden; i++) state[i] += states[r][i];
            norm(state, head->read_norm, head->eps, hidden, both);
            round_inputs(both, hidden, rounded + (size_t)r * hidden, &steps[r]);
        } /* implied barrier */
        linear_part(lm, rounded, steps, logits, num_rows, thread, size);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int c = 0; c < CHUNKS; c++) {
            for (int r = 0; r < num_rows; r++) {
                const Request *request = &requests[rows[r].request];
                const uint8_t *in_window = request->in_window;
                const float outside = request->outside, positive = request->positive;
                const float negative = request->negative;
                float *row = logits + (size_t)r * vocabulary;
                float largest = -INFINITY;
                for (int i = start_of(c, vocabulary); i < start_of(c + 1, vocabulary); i++) {
                    const float inside = row[i] > 0 ? positive : negative;
                    row[i] *= in_window[i] ? inside : outside;
                    if (row[i] > largest) largest = row[i];
                }
                found[c][r].largest = largest;
            }
        } /* implied barrier */
#pragma omp for schedule(static)
        for (int c = 0; c < CHUNKS; c++) {
            for (int r = 0; r < num_rows; r++) {
                const Request *request = &requests[rows[r].request];
                const float power = request->noise_power;
                const float *row = logits + (size_t)r * vocabulary;
                const float largest = largest_of(found, r);
                const float least = power > 0 ? largest - REACH : -INFINITY;
                Found *own = &found[c][r];
                own->sum = 0;
                for (int i = 0; i < TOP; i++) own->top[i] = (Entry){-INFINITY, 0};
                for (int i = start_of(c, vocabulary); i < start_of(c + 1, vocabulary); i++) {
                    if (row[i] < least) continue;
                    float value = row[i];
                    if (power > 0)
                        value -= power * log_noise(request->keys[level], chain->tokens[i]);
                    own->sum += expf(value - largest);
                    if (value > own->top[TOP - 1].value) keep(own->top, value, i);
                }
            }
        }
    }

    for (int r = 0; r < num_rows; r++) {
        const float largest = largest_of(found, r);
        Entry top[TOP];
        float sum = 0;
        memcpy(top, found[0][r].top, sizeof top);
        for (int c = 0; c < CHUNKS; c++) {
            sum += found[c][r].sum;
            for (int i = 0; c > 0 && i < TOP && found[c][r].top[i].value > top[TOP - 1].value; i++)
                keep(top, found[c][r].top[i].value, found[c][r].top[i].index);
        }
        for (int i = 0; i < TOP; i++) {
            /* Fewer than TOP may be within reach: the others have no chance. */
            const int has_chance = top[i].value > -INFINITY;
            rows[r].chances[i] = has_chance ? expf(top[i].value - largest) / sum : 0.0f;
            rows[r].places[i] = top[i].index;
            rows[r].tokens[i] = chain->tokens[top[i].index];
        }
    }
}

/* The paths of the next level: of each request the BEAM_WIDTH best that have least_chance. */
static int choose_paths(const Chain *chain, const Row *rows, int num_rows, float least_chance,
                        Row *next, const uint16_t **embedded) {
    int count = 0;
    for (int first = 0, end; first < num_rows; first = end) {
        for (end = first; end < num_rows && rows[end].request == rows[first].request; end++) {}
        Row best[BEAM_WIDTH];
        int kept = 0;
        for (int r = first; r < end; r++) {
            for (int i = 0; i < TOP; i++) {
                const float chance = rows[r].chance * rows[r].chances[i];
                if (chance < least_chance) break; /* likeliest first */
                int place = kept;
                while (place > 0 && best[place - 1].chance < chance) place--;
                if (place == BEAM_WIDTH) continue;
                if (kept < BEAM_WIDTH) kept++;
                for (int p = kept - 1; p > place; p--) best[p] = best[p - 1];
                best[place].request = rows[r].request;
                best[place].above = r;
                best[place].place = i;
                best[place].chance = chance;
            }
        }
        for (int p = 0; p < kept; p++) next[count++] = best[p];
    }
    for (int r = 0; r < count; r++) {
        const int32_t place = rows[next[r].above].places[next[r].place];
        embedded[r] = chain->embeddings + (size_t)place * chain->heads[0].down.outputs;
    }
    return count;
}

/* rows: [num_heads][MAX_ROWS], the first level's paths filled in by the caller, whose above is
 * the row of states; counts: [num_heads], the first given. embedded: bfloat16 [counts[0]][hidden].
 * work: floats, 2 * hidden + MAX_ROWS * (3 * hidden + 2 * width + vocabulary). */
void tokenswift_descend(const Chain *chain, const Request *requests, const float *states,
                        const uint16_t *embedded, float least_chance, float *work, Row *rows,
                        int32_t *counts) {
    const int hidden = chain->heads[0].down.outputs;
    float *both_states = work, *rest = work + (size_t)2 * MAX_ROWS * hidden;
    const float *from = states;
    const uint16_t *embedded_rows[MAX_ROWS];
    const float *state_rows[MAX_ROWS];
    for (int r = 0; r < counts[0]; r++) embedded_rows[r] = embedded + (size_t)r * hidden;
    for (int level = 0; level < chain->num_heads; level++) {
        Row *own = rows + (size_t)level * MAX_ROWS;
        if (level > 0) {
            counts[level] = choose_paths(chain, own - MAX_ROWS, counts[level - 1], least_chance,
                                         own, embedded_rows);
        }
        if (counts[level] == 0) {
            for (int rest_of = level; rest_of < chain->num_heads; rest_of++) counts[rest_of] = 0;
            return;
        }
        float *new_states = both_states + (size_t)(level % 2) * MAX_ROWS * hidden;
        for (int r = 0; r < counts[level]; r++)
            state_rows[r] = from + (size_t)own[r].above * hidden;
        pass(chain, level, requests, counts[level], own, state_rows, embedded_rows, rest,
             new_states);
        from = new_states;
    }
}
