// A whole forward of a Llama-family decoder on the processor, as one C call: what engine/cpu_model.py loads.
//
// Activations between layers are float32. What a product multiplies has the type of the weights
// (float or bf16), as K/V has; sums are float32.
#include <algorithm>
#include <memory>

#include "attention.h"
#include "team.h"

namespace bb {

extern "C" {

struct LayerPointers {  // matrices packed as in matmul.h, vectors float32; null where the family has none
    const float *attention_norm, *mlp_norm, *qkv_bias, *q_norm, *k_norm;
    const void *qkv, *output, *gate_up, *down;  // gate and up alternate, panel by panel
};

struct ModelPointers {
    int64_t vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, window, is_bf16;
    float rms_eps;
    const LayerPointers* layer;
    const float *norm, *rope_cos, *rope_sin;  // rope: [max_positions][head_dim / 2]
    const void* lm_head;                      // packed
    const void* embedding;                    // [vocab][hidden], or null: the same as lm_head
};

struct BatchPointers {
    int64_t positions, rows, table_width, block_size, cells_per_head;
    const int32_t *token_ids, *at, *cells;     // [positions]: token, position in its request, K/V cell
    const int32_t *starts, *stops, *tables;    // [rows], [rows], [rows][table_width]
    void *keys, *values;                       // [layers][kv_heads][cells_per_head][head_dim]
    float* logits;                             // [rows][vocab]
};

}  // extern "C"

constexpr int BLOCK_ROWS = 256;  // rows that pass through a layer's buffers at a time
constexpr int STEP_ROWS = 64;    // rows of a product at a time


struct Buffer {  // grows to the largest forward and stays
    std::unique_ptr<float[]> data;
    size_t size = 0;
    float* floats(size_t wanted) {
        if (wanted > size) data.reset(new float[size = wanted]());
        return data.get();
    }
};

template <class E>
class Decoder {
public:
    Decoder(const ModelPointers& model, Team& team)
        : m_(model), team_(team), scratch_(team.size()) {
        q_width_ = m_.heads * m_.head_dim;
        kv_width_ = m_.kv_heads * m_.head_dim;
        hidden_k_ = stride<E>(m_.hidden), q_k_ = stride<E>(q_width_), inner_k_ = stride<E>(m_.intermediate);
        qkv_.reset(new float[(size_t)BLOCK_ROWS * (q_width_ + 2 * kv_width_)]);
        normed_.reset(new E[(size_t)BLOCK_ROWS * hidden_k_]());
        attended_.reset(new E[(size_t)BLOCK_ROWS * q_k_]());
        gated_.reset(new E[(size_t)BLOCK_ROWS * inner_k_]());
    }

    void forward(const BatchPointers& batch) {
        b_ = &batch;
        x_ = residual_.floats((size_t)batch.positions * m_.hidden);
        lay_out(std::max<int>(1, MAX_QUERIES / (m_.heads / m_.kv_heads)));
        std::atomic<int> seat{0};
        team_.run([&] { run(seat++); });
    }

private:
    struct Segment {
        int request, row, count;
    };

    struct Scratch {
        AttentionScratch<E> attention;
        alignas(64) float c[STEP_ROWS * MAX_PANELS * PANEL];
    };

    void run(int seat) {
        if (!scratch_[seat]) scratch_[seat] = std::make_unique<Scratch>();
        Scratch& mine = *scratch_[seat];
        if (matrix_unit()) amx_begin();
        team_.share(b_->positions, [&](int row) { embed(row); });
        for (int layer = 0; layer < m_.layers; ++layer)
            for (int from = 0; from < b_->positions; from += BLOCK_ROWS)
                pass(m_.layer[layer], layer, from, std::min<int>(BLOCK_ROWS, b_->positions - from), mine);
        for (int from = 0; from < b_->rows; from += BLOCK_ROWS)
            head(from, std::min<int>(BLOCK_ROWS, b_->rows - from), mine);
        if (matrix_unit()) amx_end();
    }

    static bool matrix_unit() { return std::is_same_v<E, bf16> && amx_granted(); }

    void embed(int row) {
        const int token = b_->token_ids[row];
        float* to = x_ + (size_t)row * m_.hidden;
        if (m_.embedding) {
            const E* from = (const E*)m_.embedding + (size_t)token * m_.hidden;
            for (int i = 0; i < m_.hidden; i += LANES) store_part(to + i, load_part(from + i, m_.hidden - i), m_.hidden - i);
            return;
        }
        const E* panel = (const E*)m_.lm_head + (size_t)(token / PANEL) * hidden_k_ * PANEL;
        for (int i = 0; i < m_.hidden; ++i) to[i] = packed_at(panel, i, token % PANEL);
    }

    static float packed_at(const float* panel, int k, int column) { return panel[k * PANEL + column]; }
    static float packed_at(const bf16* panel, int k, int column) {
        const uint32_t bits = (uint32_t)panel[k / 2 * 2 * PANEL + column * 2 + k % 2].bits << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    // One layer for rows from .. from + rows - 1 of the batch. Earlier rows have passed it already,
    // so all K/V that these rows read is there once theirs is written.
    void pass(const LayerPointers& w, int layer, int from, int rows, Scratch& mine) {
        float* x = x_ + (size_t)from * m_.hidden;
        team_.share(rows, [&](int r) { norm(x + (size_t)r * m_.hidden, w.attention_norm, r); });
        const int qkv_width = q_width_ + 2 * kv_width_;
        product(rows, normed_.get(), hidden_k_, w.qkv, qkv_width, mine, [&](int r, int n, const float* c, int panels) {
            for (int p = 0; p < panels * PANEL; p += PANEL) {
                const int left = qkv_width - n - p;
                const Lanes bias = w.qkv_bias ? load_part(w.qkv_bias + n + p, left) : Lanes{};
                store_part(qkv_.get() + (size_t)r * qkv_width + n + p, load(c + p) + bias, left);
            }
        });
        team_.share(rows, [&](int r) { rotate_and_keep(w, layer, from, r); });
        share_attention(layer, from, mine.attention);
        product(rows, attended_.get(), q_k_, w.output, m_.hidden, mine, [&](int r, int n, const float* c, int panels) {
            add_to(x + (size_t)r * m_.hidden, n, c, panels);
        });
        team_.share(rows, [&](int r) { norm(x + (size_t)r * m_.hidden, w.mlp_norm, r); });
        product<2>(rows, normed_.get(), hidden_k_, w.gate_up, gate_up_width(), mine, [&](int r, int n, const float* c, int panels) {
            for (int p = 0; p < panels; p += 2) {
                const int column = (n / PANEL + p) / 2 * PANEL;
                const Lanes gated = silu(load(c + p * PANEL)) * load(c + (p + 1) * PANEL);
                store_part(gated_.get() + (size_t)r * inner_k_ + column, gated, m_.intermediate - column);
            }
        });
        product(rows, gated_.get(), inner_k_, w.down, m_.hidden, mine, [&](int r, int n, const float* c, int panels) {
            add_to(x + (size_t)r * m_.hidden, n, c, panels);
        });
    }

    int gate_up_width() const { return 2 * round_up(m_.intermediate, PANEL); }

    void add_to(float* row, int n, const float* c, int panels) const {
        for (int p = 0; p < panels * PANEL; p += PANEL) {
            const int left = (int)m_.hidden - n - p;
            store_part(row + n + p, load_part(row + n + p, left) + load(c + p), left);
        }
    }

    // Last norm and logits, for the last position of each request.
    void head(int from, int rows, Scratch& mine) {
        team_.share(rows, [&](int r) { norm(x_ + (size_t)last_[from + r] * m_.hidden, m_.norm, r); });
        product(rows, normed_.get(), hidden_k_, m_.lm_head, m_.vocab, mine, [&](int r, int n, const float* c, int panels) {
            float* to = b_->logits + (size_t)(from + r) * m_.vocab;
            for (int p = 0; p < panels * PANEL; p += PANEL) store_part(to + n + p, load(c + p), (int)m_.vocab - n - p);
        });
    }

    // Root-mean-square norm (Zhang and Sennrich, 2019) of a row of x into row r of normed_.
    void norm(const float* x, const float* weight, int r) { norm_to(x, weight, m_.hidden, normed_.get() + (size_t)r * hidden_k_); }

    template <class Out>
    void norm_to(const float* x, const float* weight, int width, Out* to) const {
        Lanes squares{};
        for (int i = 0; i < width; i += LANES) {
            const Lanes v = load_part(x + i, width - i);
            squares = fma(v, v, squares);
        }
        const float scale = 1.f / std::sqrt(sum(squares) / width + m_.rms_eps);
        for (int i = 0; i < width; i += LANES)
            store_part(to + i, load_part(x + i, width - i) * scale * load_part(weight + i, width - i), width - i);
    }

    // Rotary embedding (Su et al., 2021), halves convention; queries are scaled, K/V go to their cells.
    void rotate_and_keep(const LayerPointers& w, int layer, int from, int r) {
        const int d = m_.head_dim;
        float* qkv = qkv_.get() + (size_t)r * (q_width_ + 2 * kv_width_);
        const float* cos = m_.rope_cos + (size_t)b_->at[from + r] * (d / 2);
        const float* sin = m_.rope_sin + (size_t)b_->at[from + r] * (d / 2);
        const float scale = 1.f / std::sqrt((float)d);
        for (int h = 0; h < m_.heads; ++h) {
            if (w.q_norm) norm_to(qkv + h * d, w.q_norm, d, qkv + h * d);
            rotate(qkv + h * d, cos, sin, scale);
        }
        for (int h = 0; h < m_.kv_heads; ++h) {
            float *k = qkv + q_width_ + h * d, *v = k + kv_width_;
            if (w.k_norm) norm_to(k, w.k_norm, d, k);
            rotate(k, cos, sin, 1.f);
            const size_t cell = ((size_t)(layer * m_.kv_heads + h) * b_->cells_per_head + b_->cells[from + r]) * d;
            for (int i = 0; i < d; i += LANES) {
                store_part((E*)b_->keys + cell + i, load_part(k + i, d - i), d - i);
                store_part((E*)b_->values + cell + i, load_part(v + i, d - i), d - i);
            }
        }
    }

    void rotate(float* x, const float* cos, const float* sin, float scale) const {
        const int half = m_.head_dim / 2;
        for (int i = 0; i < half; i += LANES) {
            const int left = half - i;
            const Lanes a = load_part(x + i, left), b = load_part(x + half + i, left);
            const Lanes c = load_part(cos + i, left), s = load_part(sin + i, left);
            store_part(x + i, (a * c - b * s) * scale, left);
            store_part(x + half + i, (b * c + a * s) * scale, left);
        }
    }

    // Attention of one block of rows: a task is a tile of one request's positions and one K/V head.
    void share_attention(int layer, int from, AttentionScratch<E>& scratch) {
        const int group = m_.heads / m_.kv_heads, qkv_width = q_width_ + 2 * kv_width_;
        const size_t head_cells = (size_t)b_->cells_per_head * m_.head_dim;
        const E* keys = (const E*)b_->keys + layer * m_.kv_heads * head_cells;
        const E* values = (const E*)b_->values + layer * m_.kv_heads * head_cells;
        const std::vector<Segment>& segments = segments_[from / BLOCK_ROWS];
        team_.share((int)(segments.size() * m_.kv_heads), [&](int task) {
            const Segment& part = segments[task / m_.kv_heads];
            const int h = task % m_.kv_heads, r = part.row - from, at_head = h * group * m_.head_dim;
            const QueryTile tile{qkv_.get() + (size_t)r * qkv_width + at_head, qkv_width, b_->at[part.row], part.count, group,
                                 (int)m_.head_dim, (int)m_.window, b_->tables + part.request * b_->table_width,
                                 (int)b_->block_size};
            attend(tile, keys + h * head_cells, values + h * head_cells, attended_.get() + (size_t)r * q_k_ + at_head, q_k_,
                   scratch);
        });
    }

    // Cuts the batch into pieces of one request, at most `most` positions and within one block of rows each.
    void lay_out(int most) {
        segments_.assign((b_->positions + BLOCK_ROWS - 1) / BLOCK_ROWS, {});
        last_.clear();
        int row = 0;
        for (int request = 0; request < b_->rows; ++request) {
            const int end = row + b_->stops[request] - b_->starts[request];
            for (int count; row < end; row += count) {
                count = std::min({most, end - row, BLOCK_ROWS - row % BLOCK_ROWS});
                segments_[row / BLOCK_ROWS].push_back({request, row, count});
            }
            last_.push_back(end - 1);
        }
    }

    // a [rows][k] times packed weights of `width` outputs; finish(row, first output, sums, panels) takes each result.
    // A task is some panels, in multiples of `together`, and some rows: many rows are cut in two, so that the threads end
    // together. Rows pass in steps, whose sums are finished while they are near.
    template <int together = 1, class Finish>
    void product(int rows, const E* a, int k, const void* packed, int width, Scratch& mine, Finish finish) {
        const int panels = round_up(width, PANEL) / PANEL, wide = panels_of(rows, panels) / together * together;
        const int parts = rows >= 2 * STEP_ROWS ? 2 : 1, height = round_up((rows + parts - 1) / parts, STEP_ROWS);
        const long panel = (long)k * PANEL;
        team_.share((panels + wide - 1) / wide * parts, [&](int task) {
            const int first = task / parts * wide, count = std::min(wide, panels - first), ldc = count * PANEL;
            const int begin = task % parts * height, end = std::min(rows, begin + height);
            const E* b = (const E*)packed + first * panel;
            for (int from = begin; from < end; from += STEP_ROWS) {
                const int step = std::min(STEP_ROWS, end - from);
                multiply<false>(step, count, a + (size_t)from * k, k, b, panel, mine.c, ldc);
                for (int r = 0; r < step; ++r) finish(from + r, first * PANEL, mine.c + (size_t)r * ldc, count);
            }
        });
    }

    const ModelPointers m_;
    Team& team_;
    const BatchPointers* b_ = nullptr;
    int q_width_, kv_width_, hidden_k_, q_k_, inner_k_;
    Buffer residual_;
    float* x_ = nullptr;  // [positions][hidden]
    std::vector<std::vector<Segment>> segments_;  // per block of rows
    std::vector<int> last_;                       // batch row of each request's last position
    std::unique_ptr<float[]> qkv_;                // [BLOCK_ROWS][q | k | v]
    std::unique_ptr<E[]> normed_, attended_, gated_;  // [BLOCK_ROWS][stride of k]; what pads a row stays zero
    std::vector<std::unique_ptr<Scratch>> scratch_;
};

// [rows][k] to panels, `step` panels apart; see matmul.h. Outputs beyond `rows` and k beyond `k` are zero.
void pack(const float* from, long rows, long k, float* to, long step) {
    for (long n = 0; n < round_up(rows, PANEL); ++n)
        for (long i = 0; i < k; ++i)
            to[n / PANEL * step * k * PANEL + i * PANEL + n % PANEL] = n < rows ? from[n * k + i] : 0.f;
}

void pack(const bf16* from, long rows, long k, bf16* to, long step) {
    const long padded = padded_k(k);
    for (long n = 0; n < round_up(rows, PANEL); ++n)
        for (long i = 0; i < padded; ++i)
            to[n / PANEL * step * padded * PANEL + i / 2 * 2 * PANEL + n % PANEL * 2 + i % 2] =
                n < rows && i < k ? from[n * k + i] : bf16{0};
}

struct Model {
    Team team;
    std::unique_ptr<Decoder<float>> wide;
    std::unique_ptr<Decoder<bf16>> half;

    Model(const ModelPointers& pointers, int threads) : team(threads) {
        if (pointers.is_bf16) half = std::make_unique<Decoder<bf16>>(pointers, team);
        else wide = std::make_unique<Decoder<float>>(pointers, team);
    }
};

}  // namespace bb

extern "C" {

bb::Model* bb_create(const bb::ModelPointers* pointers, int threads) { return new bb::Model(*pointers, threads); }

void bb_destroy(bb::Model* model) { delete model; }

void bb_forward(bb::Model* model, const bb::BatchPointers* batch) {
    if (model->half) model->half->forward(*batch);
    else model->wide->forward(*batch);
}

// The best id of each row, the lowest among equals, and the best two logits. A row that holds a NaN gets a NaN.
void bb_top_two(bb::Model* model, const float* logits, int64_t rows, int64_t vocab, int64_t* ids, float* best_two) {
    model->team.run([&] {
        model->team.share((int)rows, [&](int r) {
            const float* row = logits + r * vocab;
            float best = -INFINITY, second = -INFINITY, sum = 0;
            int64_t at = 0;
            for (int64_t i = 0; i < vocab; ++i) {
                sum += row[i] * 0.f;  // not a number if any logit is not finite
                if (row[i] > best) second = best, best = row[i], at = i;
                else if (row[i] > second) second = row[i];
            }
            ids[r] = at;
            best_two[2 * r] = best + sum, best_two[2 * r + 1] = second + sum;
        });
    });
}

// [rows][k] of a matrix to packed panels, `step` panels apart.
void bb_pack(const void* from, int64_t rows, int64_t k, void* to, int64_t step, int is_bf16) {
    if (is_bf16) bb::pack((const bb::bf16*)from, rows, k, (bb::bf16*)to, step);
    else bb::pack((const float*)from, rows, k, (float*)to, step);
}

// What the products run on: for the record.
const char* bb_unit(int is_bf16) {
    if (is_bf16 && bb::amx_granted()) return "amx";
#if defined(__AVX512BF16__)
    if (is_bf16) return "avx512_bf16";
#endif
#if defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__aarch64__)
    return "neon";
#else
    return "generic";
#endif
}

}  // extern "C"
