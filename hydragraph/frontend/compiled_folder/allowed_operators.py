"""Operators allowed in compiled folders: they do not access files, draw random numbers or mutate inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import hydragraph.kernels.attention_dropout
import hydragraph.kernels.dropout
import hydragraph.kernels.linear_cross_entropy
import hydragraph.kernels.token_entropy
import hydragraph.kernels.varlen_attention  # noqa: F401  these register the operators
from hydragraph.ir.graph_data import PYTHON, known_target
from hydragraph.private.operator_schemas import signature_of

_ATEN = """
elementwise
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone complex copysign cos cosh
    deg2rad div elu eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le leaky_relu lerp lgamma log log10 log1p log2
    log_sigmoid log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mul nan_to_num ne neg polar positive pow prelu _prelu_kernel reciprocal relu relu6
    remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub tan
    tanh threshold trunc where xlogy
    __and__ __or__ __xor__ __lshift__ __rshift__ _to_copy to type_as
and their derivatives
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward _prelu_kernel_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
products
    addbmm addmm addmv addr baddbmm bmm dot einsum _grouped_mm inner linear matmul mm mv outer tensordot
    convolution convolution_backward conv1d conv2d
reductions and operators along a dimension
    all amax amin any argmax argmin argsort bincount count_nonzero cummax cummin cummaxmin_backward cumprod
    cumprod_backward cumsum diff histc kthvalue linalg_vector_norm logcumsumexp logsumexp log_softmax _log_softmax
    _log_softmax_backward_data max mean median min norm one_hot prod renorm softmax _safe_softmax _softmax
    _softmax_backward_data sort std std_mean sum topk value_selecting_reduction_backward var var_mean
norms and losses
    batch_norm _native_batch_norm_legit_no_training native_batch_norm_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits cross_entropy_loss _fused_rms_norm
    _fused_rms_norm_backward group_norm native_group_norm native_group_norm_backward huber_loss huber_loss_backward
    kl_div l1_loss layer_norm mse_loss mse_loss_backward native_layer_norm native_layer_norm_backward nll_loss
    nll_loss_backward nll_loss_forward nll_loss_nd rms_norm smooth_l1_loss smooth_l1_loss_backward glu glu_backward
selection and replacement of elements
    embedding embedding_dense_backward gather index index_add index_copy index_fill index_put index_select
    masked_scatter masked_select nonzero repeat_interleave scatter scatter_add scatter_reduce searchsorted bucketize
    take_along_dim _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
shapes
    alias broadcast_tensors broadcast_to cat chunk concat constant_pad_nd contiguous copy detach diag_embed diagonal
    diagonal_backward diagonal_scatter expand expand_as flatten flip lift_fresh_copy meshgrid movedim moveaxis narrow
    numpy_T pad permute real imag repeat reshape reshape_as resolve_conj resolve_neg _conj roll select select_backward
    select_scatter slice slice_backward slice_scatter split split_with_sizes squeeze stack swapaxes t tile transpose
    tril triu unbind unflatten unfold unfold_backward unsafe_split unsafe_split_with_sizes unsqueeze _unsafe_view view
    view_as view_as_complex view_as_real view_copy sym_numel sym_size sym_stride
creation of tensors
    arange empty empty_like eye full full_like linspace new_empty new_full new_ones new_zeros ones ones_like
    scalar_tensor zeros zeros_like
"""
# as_strided and _reshape_alias are absent: they can read outside their inputs.

# Operators of hydragraph and transformers (`private.experts`).
_OTHERS = """
    hydragraph::attention_dropout hydragraph::attention_dropout_backward hydragraph::causal_convolution
    hydragraph::causal_convolution_backward hydragraph::dropout hydragraph::gated_delta_rule
    hydragraph::gated_delta_rule_backward
    hydragraph::grouped_mm_backward hydragraph::head_loss hydragraph::head_token_gradients
    hydragraph::head_token_losses hydragraph::scaled hydragraph::token_entropy hydragraph::varlen_attention
    hydragraph::varlen_attention_backward
    transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward
"""

_HEADINGS = frozenset(line for line in _ATEN.splitlines() if line and not line.startswith(" "))
ALLOWED = frozenset(
    {f"aten::{name}" for line in _ATEN.splitlines() if line not in _HEADINGS for name in line.split()}
    | set(_OTHERS.split())
)

# Number of arguments of methods of collectives, running sums and started collectives.
ON_COLLECTIVES: Mapping[str, int] = {
    **dict.fromkeys(("all_reduce", "all_reduce_max", "start_all_reduce"), 2),
    **dict.fromkeys(("all_gather", "reduce_scatter", "split", "start_all_gather", "start_reduce_scatter"), 3),
    "start_all_reduce_product": 3,
    "head_token_losses": 7,
    "head_loss": 9,
}
ON_SUMS: Mapping[str, int] = {"t": 1, "addmm_": 3}
ON_STARTED: Mapping[str, int] = {"result": 1}

# Types of arguments that must be constants.
_PLAIN = frozenset({"ScalarType", "MemoryFormat", "Layout", "Device", "str"})

_OF_ONE = frozenset({"operator.neg", "torch.sym_float", "torch.sym_int", "torch.sym_not", "torch._sym_sqrt"})


def check_call(name: str, given: Sequence[object], by_name: Collection[str]) -> None:
    """Raise ValueError for a forbidden call or invalid arguments.

    Args:
        name: target in graph data, such as "aten::mm.default".
    """
    if name in PYTHON:
        takes = 1 if name in _OF_ONE or name.startswith("math.") else 2
        if len(given) != takes or by_name:
            raise ValueError(f"{name} gets {len(given) + len(by_name)} arguments instead of {takes}")
        return
    if name.rpartition(".")[0] not in ALLOWED:
        raise ValueError(f"{name} is not allowed in a compiled folder")
    signature = signature_of(known_target(name))
    if not signature.pure:
        raise ValueError(f"{name} writes into its arguments")
    if len(given) > signature.positional:
        raise ValueError(f"{name} gets {len(given)} positional arguments, more than {signature.positional}")
    present = {*signature.names[: len(given)], *by_name}
    unknown = set(by_name) - set(signature.names[len(given) :])
    missing = signature.required - present
    if unknown or missing:
        what = f"with the unknown argument {min(unknown)}" if unknown else f"without the argument {min(missing)}"
        raise ValueError(f"{name} is called {what}")
    values = dict(zip(signature.names, given, strict=False)) | (by_name if isinstance(by_name, dict) else {})
    for argument, kind in zip(signature.names, signature.types, strict=True):
        if argument in values and not _fits(kind, values[argument]):
            what = "a tensor" if kind == "Tensor" else kind
            raise ValueError(f"{name} gets {values[argument]!r:.80} as {argument}, which must be {what}")


def _fits(kind: str, value: object) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind[9:-1], value)
    if kind.startswith("List["):
        inside = value.get("tuple") if isinstance(value, dict) and "tuple" in value else value
        return all(_fits(kind[5:-1], element) for element in (inside if isinstance(inside, list) else [value]))
    tag = next(iter(value)) if isinstance(value, dict) and value else None
    if tag == "node" and kind not in _PLAIN:
        return True
    match kind:
        case "Tensor" | "number" | "float" | "complex":
            # PyTorch accepts a number as a 0-d tensor
            return isinstance(value, int | float) or tag == "float" or (tag == "complex" and kind != "float")
        case "int" | "SymInt" | "bool":
            return isinstance(value, int)
        case "ScalarType" | "MemoryFormat" | "Layout":
            return tag == "torch"
        case "Device":
            return tag == "device"
        case "str":
            return isinstance(value, str)
    return False
