// Blocks of numbers as int8 codes, and back. Included by kernel_body.h, which says how.
//
// A block at a time is widened to float, in memory that stays in the nearest cache; compilers vectorise the plain loops over
// it by themselves.

constexpr float kMostCode = 127.0f;
constexpr float kLeastCoded = kMostCode * 0x1p-126f;  // below it the scale would be subnormal

// The largest magnitude. The bits of magnitudes are ordered as these are, NaNs above all, and so is their maximum whatever
// the order in which it is taken.
inline float largest_magnitude(const float* x) {
    uint32_t most = 0;
    for (int64_t i = 0; i < kCodedBlock; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return float_of(most);
}

inline float encode_block(const float* x, int8_t* codes) {
    const float most = largest_magnitude(x);
    if (!(most >= kLeastCoded) || most > __FLT_MAX__) {
        std::memset(codes, 0, kCodedBlock);
        return most <= __FLT_MAX__ ? 0.0f : float_of(0x7fc00000u);
    }
    const float inverse = kMostCode / most;
    for (int64_t i = 0; i < kCodedBlock; ++i) {
        // At this size the last bit of a float is one, so the sum is rounded to the nearest whole number, to even between
        // two, and its low bits are that number's.
        codes[i] = static_cast<int8_t>(bits_of(x[i] * inverse + 0x1.8p23f));
    }
    return most / kMostCode;
}

template <class V, class T>
void encode_range(const T* x, const CodedBlocks& to, int64_t begin, int64_t end) {
    alignas(64) float block[kCodedBlock];
    for (int64_t b = begin; b < end; ++b) {
        const T* from = x + b * kCodedBlock;
        for (int64_t i = 0; i < kCodedBlock; i += V::width) {
            __builtin_prefetch(from + i + kSumPrefetch);
            V::store(block + i, V::load(from + i));
        }
        to.scales[b] = encode_block(block, to.codes + b * kCodedBlock);
    }
}

template <class V>
void encode(const void* x, DType dtype, const CodedBlocks& to, int64_t begin, int64_t end) {
    switch (dtype) {
        case DType::kBFloat16: return encode_range<V>(static_cast<const bf16*>(x), to, begin, end);
        case DType::kFloat16: return encode_range<V>(static_cast<const fp16*>(x), to, begin, end);
        default: return encode_range<V>(static_cast<const float*>(x), to, begin, end);
    }
}

template <class V, class T>
void decode_range(const CodedBlocks& from, T* x, int64_t begin, int64_t end) {
    alignas(64) float block[kCodedBlock];
    for (int64_t b = begin; b < end; ++b) {
        const int8_t* codes = from.codes + b * kCodedBlock;
        const float scale = from.scales[b];
        for (int64_t i = 0; i < kCodedBlock; ++i) block[i] = static_cast<float>(codes[i]) * scale;
        T* to = x + b * kCodedBlock;
        for (int64_t i = 0; i < kCodedBlock; i += V::width) V::store(to + i, V::load(block + i));
    }
}

template <class V>
void decode(const CodedBlocks& from, void* x, DType dtype, int64_t begin, int64_t end) {
    switch (dtype) {
        case DType::kBFloat16: return decode_range<V>(from, static_cast<bf16*>(x), begin, end);
        case DType::kFloat16: return decode_range<V>(from, static_cast<fp16*>(x), begin, end);
        default: return decode_range<V>(from, static_cast<float*>(x), begin, end);
    }
}
