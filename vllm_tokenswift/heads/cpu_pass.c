/* One pass of a conditioned head on a CPU: from states and embeddings to the likeliest tokens.
 *
 * What the torch modules of heads/model.py compute in some twenty operations, done in one.
 * After a pass of the target the caches hold the target, so that each operation of torch
 * costs tens of microseconds before it does anything; and the weights, read once per pass,
 * are int8 with one scale per row, which is a draft's precision and half of bfloat16's bytes.
 * What they are multiplied with is int16, also with a scale per row: sums of integers may be
 * made in any order, so that compilers vectorize them, and do not depend on it.
 *
 * Plain C with OpenMP, called from heads/cpu_pass.py, which describes the arguments. Nothing
 * here is allocated. Tokens do not depend on the number of threads; their probabilities do in
 * the last bits, by the order in which the exponentials of the softmax are added.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum { MAX_ROWS = 8, TOP = 8, MAX_THREADS = 256 };

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

/* work: floats, 2 * hidden + rows * (hidden + 2 * width + vocabulary), not initialised. */
void tokenswift_head_pass(const Head *head, const Linear *lm, int32_t rows, const float *states,
                          const int32_t *before, const uint16_t *embedded, const float *scales,
                          const int32_t *owner, float *work, float *new_states,
                          float *probabilities, int64_t *indices) {
    const int hidden = head->down.outputs, width = head->up.outputs, vocabulary = lm->outputs;
    float *both = work;                          /* [2 * hidden], of one row */
    float *wide = both + 2 * hidden;             /* [rows][width] */
    float *logits = wide + (size_t)rows * width; /* [rows][vocabulary] */
    /* [rows][inputs of the layer], of one layer after the other */
    int16_t *rounded = (int16_t *)(logits + (size_t)rows * vocabulary);
    float steps[MAX_ROWS]; /* of the rounded inputs */
    Entry tops[MAX_THREADS][MAX_ROWS][TOP];
    float sums[MAX_THREADS][MAX_ROWS];
    int threads = omp_get_max_threads();
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    int team = 1;

#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), size = omp_get_num_threads();
#pragma omp single
        {
            team = size;
            for (int r = 0; r < rows; r++) {
                float *pair = both, *token = both + hidden;
                norm(states + (size_t)before[r] * hidden, head->state_norm, head->eps, hidden, pair);
                for (int i = 0; i < hidden; i++)
                    token[i] = of_bfloat16(embedded[(size_t)r * hidden + i]);
                norm(token, head->token_norm, head->eps, hidden, token);
                round_inputs(pair, 2 * hidden, rounded + (size_t)r * 2 * hidden, &steps[r]);
            }
        } /* implied barrier */
        linear_part(&head->up, rounded, steps, wide, rows, thread, size);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int i = 0; i < rows * width; i++) wide[i] = wide[i] / (1.0f + expf(-wide[i]));
#pragma omp single
        for (int r = 0; r < rows; r++)
            round_inputs(wide + (size_t)r * width, width, rounded + (size_t)r * width, &steps[r]);
        linear_part(&head->down, rounded, steps, new_states, rows, thread, size);
#pragma omp barrier
#pragma omp single
        for (int r = 0; r < rows; r++) {
            float *state = new_states + (size_t)r * hidden;
            const float *from = states + (size_t)before[r] * hidden;
            for (int i = 0; i < hidden; i++) state[i] += from[i];
            norm(state, head->read_norm, head->eps, hidden, both);
            round_inputs(both, hidden, rounded + (size_t)r * hidden, &steps[r]);
        } /* implied barrier */
        linear_part(lm, rounded, steps, logits, rows, thread, size);
#pragma omp barrier
        const int first = (int)((int64_t)vocabulary * thread / size);
        const int last = (int)((int64_t)vocabulary * (thread + 1) / size);
        for (int r = 0; r < rows; r++) {
            float *row = logits + (size_t)r * vocabulary;
            const float *positive = scales + (size_t)owner[r] * 2 * vocabulary;
            const float *negative = positive + vocabulary;
            Entry *top = tops[thread][r];
            for (int i = 0; i < TOP; i++) top[i] = (Entry){-INFINITY, 0};
            for (int i = first; i < last; i++) {
                const float value = row[i] * (row[i] > 0 ? positive[i] : negative[i]);
                row[i] = value;
                if (value > top[TOP - 1].value) keep(top, value, i);
            }
            float sum = 0;
            const float largest = top[0].value;
            for (int i = first; i < last; i++) sum += expf(row[i] - largest);
            sums[thread][r] = sum;
        }
    }

    for (int r = 0; r < rows; r++) {
        Entry top[TOP];
        memcpy(top, tops[0][r], sizeof top);
        for (int t = 1; t < team; t++)
            for (int i = 0; i < TOP && tops[t][r][i].value > top[TOP - 1].value; i++)
                keep(top, tops[t][r][i].value, tops[t][r][i].index);
        float sum = 0;
        for (int t = 0; t < team; t++)
            if (sums[t][r] > 0) sum += sums[t][r] * expf(tops[t][r][0].value - top[0].value);
        for (int i = 0; i < TOP; i++) {
            probabilities[r * TOP + i] = expf(top[i].value - top[0].value) / sum;
            indices[r * TOP + i] = top[i].index;
        }
    }
}
