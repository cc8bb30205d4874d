// The kernels for any processor, left to the compiler's own vectoriser.
#include <cstring>

#include "kernels.h"

namespace lightning_zero {
namespace {

#if defined(__clang__)
#define LIGHTNING_ZERO_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define LIGHTNING_ZERO_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
#include "vec_scalar.h"
#include "kernel_body.h"

}  // namespace

const KernelTable* portable_kernels() { return &kTable<Scalar>; }

}  // namespace lightning_zero
