# Addresses are those of contiguous buffers, 0 for none; dtype codes are those of csrc/kernels.h.

def available_isas() -> list[str]: ...
def adam_step(
    isa: str,
    numel: int,
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    max_exp_avg_sq: int,
    grad: int,
    grad_dtype: int,
    copy: int,
    copy_dtype: int,
    undo: int,
    grad_scale: float,
    decay: float,
    coupled: bool,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    bias_correction2_sqrt: float,
    eps: float,
    negative_step_size: float,
    num_threads: int,
    /,
) -> None: ...
def sum_of_squares(isa: str, grad: int, dtype: int, numel: int, num_threads: int, /) -> float: ...
def has_nonfinite(isa: str, grad: int, dtype: int, numel: int, num_threads: int, /) -> bool: ...
def is_copy(isa: str, exact: int, copy: int, dtype: int, numel: int, num_threads: int, /) -> bool: ...
def cross_entropy(
    isa: str,
    rows: int,
    classes: int,
    logits: int,
    dtype: int,
    grad: int,
    target: int,
    ignore_index: int,
    weight: int,
    weight_sum: float,
    label_smoothing: float,
    grad_scale: float,
    losses: int,
    num_threads: int,
    /,
) -> None: ...
def scale_rows(isa: str, rows: int, columns: int, x: int, dtype: int, factors: int, num_threads: int, /) -> None: ...
def encode_blocks(isa: str, blocks: int, x: int, dtype: int, codes: int, scales: int, num_threads: int, /) -> None: ...
def decode_blocks(isa: str, blocks: int, codes: int, scales: int, x: int, dtype: int, num_threads: int, /) -> None: ...

class Transfer:
    def wait(self) -> tuple[int, int, int]: ...
    def done(self) -> bool: ...

class BlockSums:
    def __init__(self) -> None: ...
    def extend(self, first: int, count: int, /) -> None: ...

class FileQueue:
    def __init__(self, threads: int) -> None: ...
    def busy_seconds(self) -> float: ...
    def submit(self, file: int, write: bool, buffer: int, bytes: int, offset: int, align: int, sums: BlockSums | None) -> Transfer: ...
