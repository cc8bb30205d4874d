// The Python face of the kernels. Buffers arrive as addresses: what they are (dtype, device, layout, length) has been
// checked by lightning_zero.ops, the only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "file_io.h"
#include "kernels.h"
#include "neighbours.h"

namespace nb = nanobind;
using namespace lightning_zero;

namespace {

struct NamedIsa {
    const char* name;
    Isa isa;
};
// Fastest first. AVX-512 comes second: divisions and square roots are no wider there, and on the processor measured
// (Sapphire Rapids) it takes as long as AVX2 from memory and a tenth longer in cache.
constexpr NamedIsa kIsas[] = {
    {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512}, {"neon", Isa::kNeon}, {"portable", Isa::kPortable}};

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const NamedIsa& candidate : kIsas) {
        if (isa_available(candidate.isa)) names.emplace_back(candidate.name);
    }
    return names;
}

Isa isa_named(const std::string& name) {
    for (const NamedIsa& candidate : kIsas) {
        if (name == candidate.name && isa_available(candidate.isa)) return candidate.isa;
    }
    throw nb::value_error(("instruction set not available: " + name).c_str());
}

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// A message as Python has it: with the tensor whose memory it is, and taken back if nobody has waited for it.
struct Ticket {
    std::shared_ptr<Neighbours> neighbours;
    std::shared_ptr<Message> message;
    nb::object tensor;

    Ticket(std::shared_ptr<Neighbours> n, std::shared_ptr<Message> m, nb::object t)
        : neighbours(std::move(n)), message(std::move(m)), tensor(std::move(t)) {}
    Ticket(const Ticket&) = delete;
    ~Ticket() { neighbours->cancel(message); }

    int wait(double seconds) {
        int outcome;
        {
            const nb::gil_scoped_release release;
            outcome = neighbours->wait(message, seconds);
        }
        if (outcome == Message::kDone) tensor.reset();
        return outcome;
    }
};

}  // namespace

NB_MODULE(_kernels, m) {
    nb::set_leak_warnings(false);  // a process that ends in an exception keeps what its traceback holds
    nb::class_<Transfer>(m, "Transfer")
        .def(
            "wait",
            [](Transfer& transfer) {
                const Transfer::Result result = transfer.wait();
                return std::make_tuple(result.error, result.bytes, result.changed);
            },
            nb::call_guard<nb::gil_scoped_release>())
        .def("done", &Transfer::done);
    nb::class_<BlockSums>(m, "BlockSums").def(nb::init<>()).def("extend", &BlockSums::extend);
    nb::class_<FileQueue>(m, "FileQueue")
        .def(nb::init<int>(), nb::arg("threads"))
        .def("busy_seconds", &FileQueue::busy_seconds)
        .def(
            "submit",
            [](FileQueue& queue, int file, bool write, uintptr_t buffer, int64_t bytes, int64_t offset, int64_t align,
               std::shared_ptr<BlockSums> sums) {
                return queue.submit(file, write, pointer<void>(buffer), bytes, offset, align, std::move(sums));
            },
            nb::arg("file"), nb::arg("write"), nb::arg("buffer"), nb::arg("bytes"), nb::arg("offset"), nb::arg("align"),
            nb::arg("sums").none(), nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Neighbours>(m, "Neighbours")
        .def(nb::init<int, int, int>(), nb::arg("place"), nb::arg("places"), nb::arg("board"))
        .def_static("board_bytes", &Neighbours::board_bytes)
        .def_static(
            "read", [](int pid, uintptr_t address, uintptr_t to, int64_t bytes) {
                return Neighbours::read(pid, address, pointer<void>(to), bytes);
            })
        .def("add", &Neighbours::add)
        .def("send",
             [](std::shared_ptr<Neighbours> all, int peer, uint64_t key, uintptr_t memory, int64_t bytes, nb::object tensor) {
                 auto message = all->send(peer, key, pointer<void>(memory), bytes);
                 return new Ticket(std::move(all), std::move(message), std::move(tensor));
             })
        .def("sum",
             [](std::shared_ptr<Neighbours> all, const std::vector<int>& places, uint64_t key, uintptr_t own, uintptr_t memory,
                int64_t count, double scale, nb::object tensors) {
                 auto message = all->sum(places, key, pointer<const float>(own), pointer<float>(memory), count,
                                         static_cast<float>(scale));
                 return new Ticket(std::move(all), std::move(message), std::move(tensors));
             })
        .def("receive",
             [](std::shared_ptr<Neighbours> all, int peer, uint64_t key, uintptr_t memory, int64_t bytes, nb::object tensor) {
                 auto message = all->receive(peer, key, pointer<void>(memory), bytes);
                 return new Ticket(std::move(all), std::move(message), std::move(tensor));
             });
    nb::class_<Ticket>(m, "Ticket").def("wait", &Ticket::wait).def("error", [](Ticket& t) { return t.message->error(); }).def("over", [](Ticket& t) { return t.neighbours->over(t.message); });
    m.def("available_isas", &available_isas);
    m.def(
        "adam_step",
        [](const std::string& isa, int64_t numel, uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq,
           uintptr_t max_exp_avg_sq, uintptr_t grad, int grad_dtype, uintptr_t copy, int copy_dtype, uintptr_t undo,
           double grad_scale, double decay, bool coupled, double one_minus_beta1, double beta2, double one_minus_beta2,
           double bias_correction2_sqrt, double eps, double negative_step_size, int num_threads) {
            const auto f = [](double x) { return static_cast<float>(x); };
            const AdamFactors factors = {f(grad_scale), f(decay), f(one_minus_beta1), f(beta2), f(one_minus_beta2),
                                         f(bias_correction2_sqrt), f(eps), f(negative_step_size), coupled};
            const AdamBuffers buffers = {pointer<float>(param), pointer<float>(exp_avg), pointer<float>(exp_avg_sq),
                                         pointer<float>(max_exp_avg_sq), pointer<const void>(grad), pointer<void>(copy),
                                         pointer<float>(undo), numel, static_cast<DType>(grad_dtype), static_cast<DType>(copy_dtype), false};
            adam_step(isa_named(isa), factors, buffers, numel, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "sum_of_squares",
        [](const std::string& isa, uintptr_t grad, int dtype, int64_t numel, int num_threads) {
            return sum_of_squares(isa_named(isa), pointer<const void>(grad), static_cast<DType>(dtype), numel, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "has_nonfinite",
        [](const std::string& isa, uintptr_t grad, int dtype, int64_t numel, int num_threads) {
            return has_nonfinite(isa_named(isa), pointer<const void>(grad), static_cast<DType>(dtype), numel, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "is_copy",
        [](const std::string& isa, uintptr_t exact, uintptr_t copy, int dtype, int64_t numel, int num_threads) {
            return is_copy(isa_named(isa), pointer<const float>(exact), pointer<const void>(copy),
                           static_cast<DType>(dtype), numel, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "cross_entropy",
        [](const std::string& isa, int64_t rows, int64_t classes, uintptr_t logits, int dtype, uintptr_t grad,
           uintptr_t target, int64_t ignore_index, uintptr_t weight, double weight_sum, double label_smoothing,
           double grad_scale, uintptr_t losses, int num_threads) {
            const CrossEntropy arguments = {
                pointer<const void>(logits), pointer<void>(grad), static_cast<DType>(dtype), classes,
                pointer<const int64_t>(target), ignore_index, pointer<const float>(weight), weight_sum, label_smoothing,
                grad_scale, pointer<double>(losses)};
            cross_entropy(isa_named(isa), arguments, rows, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "scale_rows",
        [](const std::string& isa, int64_t rows, int64_t columns, uintptr_t x, int dtype, uintptr_t factors,
           int num_threads) {
            scale_rows(isa_named(isa), pointer<void>(x), static_cast<DType>(dtype), rows, columns,
                       pointer<const float>(factors), num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "encode_blocks",
        [](const std::string& isa, int64_t blocks, uintptr_t x, int dtype, uintptr_t codes, uintptr_t scales,
           int num_threads) {
            const CodedBlocks to = {pointer<int8_t>(codes), pointer<float>(scales)};
            encode_blocks(isa_named(isa), pointer<const void>(x), static_cast<DType>(dtype), to, blocks, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "decode_blocks",
        [](const std::string& isa, int64_t blocks, uintptr_t codes, uintptr_t scales, uintptr_t x, int dtype,
           int num_threads) {
            const CodedBlocks from = {pointer<int8_t>(codes), pointer<float>(scales)};
            decode_blocks(isa_named(isa), from, pointer<void>(x), static_cast<DType>(dtype), blocks, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
}
