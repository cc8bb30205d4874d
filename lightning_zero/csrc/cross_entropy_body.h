// Softmax, negative log-likelihood and its gradient, a row at a time: the row is read from memory once, the later passes
// find it in the cache. Included by kernel_body.h.

constexpr int64_t kRowBlock = 4096;  // elements summed in float before the sum goes on in double

// e^x for x <= 0, to about two units in the last place; zero below -87.7, and NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum,
// where, with the exponent's bias added, shifting it by 23 makes 2^n.
template <class V>
inline __attribute__((always_inline)) typename V::reg exp_of_negative(typename V::reg x) {
    using reg = typename V::reg;
    constexpr float kRound = 12582912.0f + 127.0f;
    x = V::max(V::set1(-88.0f), x);
    const reg shifted = V::fma(x, V::set1(1.44269504088896341f), V::set1(kRound));
    const reg n = V::sub(shifted, V::set1(kRound));
    reg r = V::fma(n, V::set1(-0.693359375f), x);
    r = V::fma(n, V::set1(2.12194440e-4f), r);
    reg p = V::fma(V::set1(1.9875691500e-4f), r, V::set1(1.3981999507e-3f));
    p = V::fma(p, r, V::set1(8.3334519073e-3f));
    p = V::fma(p, r, V::set1(4.1665795894e-2f));
    p = V::fma(p, r, V::set1(1.6666665459e-1f));
    p = V::fma(p, r, V::set1(5.0000001201e-1f));
    p = V::add(V::fma(p, V::mul(r, r), r), V::set1(1.0f));
    return V::mul(p, V::exponent_of_low_bits(shifted));
}

// Element j of a row belongs to lane j % 16 whatever the vector width; lanes are joined as a fixed tree.
inline float tree_sum(float* lanes) {
    for (int half = kSumLanes / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
}

template <class V, class T>
float row_max(const T* x, int64_t count) {
    constexpr int kVectors = kSumLanes / V::width;
    float lanes[kSumLanes];
    typename V::reg most[kVectors];
    for (int j = 0; j < kVectors; ++j) most[j] = V::set1(-__builtin_inff());
    int64_t i = 0;
    for (; i + kSumLanes <= count; i += kSumLanes) {
        for (int j = 0; j < kVectors; ++j) most[j] = V::max(most[j], V::load(x + i + j * V::width));
    }
    for (int j = 0; j < kVectors; ++j) V::store(lanes + j * V::width, most[j]);
    for (int j = 0; i < count; ++i, ++j) lanes[j] = Scalar::max(lanes[j], Scalar::load(x + i));
    for (int j = 1; j < kSumLanes; ++j) lanes[0] = Scalar::max(lanes[0], lanes[j]);
    return lanes[0];
}

enum class Smoothing { kNone, kEven, kWeighted };

struct RowSums {
    double exponentials;  // sum of e^(x - max)
    double shifted;       // sum of weight * (x - max); only where labels are smoothed
};

template <class V, Smoothing kSmoothing, class T>
inline __attribute__((always_inline)) void add_to_sums(
    const T* x, const float* weight, typename V::reg max, typename V::reg* exponentials, typename V::reg* shifted) {
    const typename V::reg difference = V::sub(V::load(x), max);
    *exponentials = V::add(*exponentials, exp_of_negative<V>(difference));
    if (kSmoothing == Smoothing::kEven) *shifted = V::add(*shifted, difference);
    if (kSmoothing == Smoothing::kWeighted) *shifted = V::fma(V::load(weight), difference, *shifted);
}

template <class V, Smoothing kSmoothing, class T>
RowSums row_sums(const T* x, const float* weight, int64_t count, float max) {
    constexpr int kVectors = kSumLanes / V::width;
    RowSums sums = {0, 0};
    for (int64_t start = 0; start < count; start += kRowBlock) {
        const int64_t stop = count - start < kRowBlock ? count : start + kRowBlock;
        float lanes[2][kSumLanes];
        typename V::reg partial[2][kVectors];
        for (int j = 0; j < kVectors; ++j) partial[0][j] = partial[1][j] = V::set1(0.0f);
        int64_t i = start;
        for (; i + kSumLanes <= stop; i += kSumLanes) {
            for (int j = 0; j < kVectors; ++j) {
                const int64_t at = i + j * V::width;
                add_to_sums<V, kSmoothing>(x + at, weight + at, V::set1(max), &partial[0][j], &partial[1][j]);
            }
        }
        for (int j = 0; j < kVectors; ++j) {
            V::store(lanes[0] + j * V::width, partial[0][j]);
            V::store(lanes[1] + j * V::width, partial[1][j]);
        }
        for (int j = 0; i < stop; ++i, ++j) {
            add_to_sums<Scalar, kSmoothing>(x + i, weight + i, max, &lanes[0][j], &lanes[1][j]);
        }
        sums.exponentials += tree_sum(lanes[0]);
        if (kSmoothing != Smoothing::kNone) sums.shifted += tree_sum(lanes[1]);
    }
    return sums;
}

// out = e^(x - max) * factor - even * weight; out may be x.
template <class V, Smoothing kSmoothing, class T>
inline __attribute__((always_inline)) void write_gradient(
    const T* x, const float* weight, T* out, float max, float factor, float even) {
    const typename V::reg exponential = exp_of_negative<V>(V::sub(V::load(x), V::set1(max)));
    typename V::reg grad;
    if (kSmoothing == Smoothing::kNone) grad = V::mul(exponential, V::set1(factor));
    if (kSmoothing == Smoothing::kEven) grad = V::fma(exponential, V::set1(factor), V::set1(-even));
    if (kSmoothing == Smoothing::kWeighted) {
        grad = V::fma(V::load(weight), V::set1(-even), V::mul(exponential, V::set1(factor)));
    }
    V::store(out, grad);
}

template <class V, Smoothing kSmoothing, class T>
void cross_entropy_rows(const CrossEntropy& c, int64_t begin, int64_t end) {
    const double on_target = 1 - c.label_smoothing;
    const double on_each = c.label_smoothing / static_cast<double>(c.classes);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(c.logits) + row * c.classes;
        T* out = c.grad == nullptr ? nullptr : static_cast<T*>(c.grad) + row * c.classes;
        const int64_t target = c.target[row];
        if (target == c.ignore_index) {
            c.losses[row] = 0;
            if (out != nullptr) std::memset(static_cast<void*>(out), 0, static_cast<size_t>(c.classes) * sizeof(T));
            continue;
        }
        const double target_weight = c.weight == nullptr ? 1.0 : static_cast<double>(c.weight[target]);
        const float max = row_max<V>(x, c.classes);
        const RowSums sums = row_sums<V, kSmoothing>(x, c.weight, c.classes, max);
        const float target_logit = Scalar::load(x + target);
        const double log_sum = __builtin_log(sums.exponentials);
        double loss = on_target * target_weight * (log_sum - (static_cast<double>(target_logit) - max));
        if (kSmoothing != Smoothing::kNone) loss += on_each * (c.weight_sum * log_sum - sums.shifted);
        c.losses[row] = loss;
        if (out == nullptr) continue;

        const double mass = on_target * target_weight + on_each * c.weight_sum;
        const double factor = c.grad_scale * mass / sums.exponentials;
        const float even = static_cast<float>(c.grad_scale * on_each);
        const double at_target = exp_of_negative<Scalar>(target_logit - max) * factor -
                                 c.grad_scale * (on_target + on_each) * target_weight;
        int64_t i = 0;
        for (; i + V::width <= c.classes; i += V::width) {
            write_gradient<V, kSmoothing>(x + i, c.weight + i, out + i, max, static_cast<float>(factor), even);
        }
        for (; i < c.classes; ++i) {
            write_gradient<Scalar, kSmoothing>(x + i, c.weight + i, out + i, max, static_cast<float>(factor), even);
        }
        Scalar::store(out + target, static_cast<float>(at_target));
    }
}

template <class V, class T>
void cross_entropy_smoothing(const CrossEntropy& c, int64_t begin, int64_t end) {
    if (c.label_smoothing == 0) return cross_entropy_rows<V, Smoothing::kNone, T>(c, begin, end);
    if (c.weight == nullptr) return cross_entropy_rows<V, Smoothing::kEven, T>(c, begin, end);
    return cross_entropy_rows<V, Smoothing::kWeighted, T>(c, begin, end);
}

template <class V>
void cross_entropy(const CrossEntropy& c, int64_t begin, int64_t end) {
    switch (c.dtype) {
        case DType::kBFloat16: return cross_entropy_smoothing<V, bf16>(c, begin, end);
        case DType::kFloat16: return cross_entropy_smoothing<V, fp16>(c, begin, end);
        default: return cross_entropy_smoothing<V, float>(c, begin, end);
    }
}

template <class V, class T>
void scale_rows_of(T* x, int64_t columns, const float* factors, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float factor = factors[row];
        T* values = x + row * columns;
        int64_t i = 0;
        for (; i + V::width <= columns; i += V::width) V::store(values + i, V::mul(V::load(values + i), V::set1(factor)));
        for (; i < columns; ++i) Scalar::store(values + i, Scalar::load(values + i) * factor);
    }
}

template <class V>
void scale_rows(void* x, DType dtype, int64_t columns, const float* factors, int64_t begin, int64_t end) {
    switch (dtype) {
        case DType::kBFloat16: return scale_rows_of<V>(static_cast<bf16*>(x), columns, factors, begin, end);
        case DType::kFloat16: return scale_rows_of<V>(static_cast<fp16*>(x), columns, factors, begin, end);
        default: return scale_rows_of<V>(static_cast<float*>(x), columns, factors, begin, end);
    }
}
