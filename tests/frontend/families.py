"""Every causal-LM family of transformers, tiny: what becomes of each, and the table in docs/support.md.

`HYDRAGRAPH_UPDATE_SUPPORT=1 pytest tests/frontend/test_families.py` writes the table anew.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.ir.program import Program
from hydragraph.passes.check_strategy import refuse_uncut
from hydragraph.spec.strategy import Strategy
from tests.frontend.execute import batch, loss

DOCS = Path(__file__).parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- families: begin (transformers {}) -->", "<!-- families: end -->"
LARGEST = 5_000_000  # parameters of a configuration that is still tiny

# what configs call their sizes; each is set where a family's config has it
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"], 101),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "word_embed_proj_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "ffn_hidden", "d_ff"], 96),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "expert_ffn_hidden_size"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers"], 2),
    **dict.fromkeys(["num_encoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "swa_num_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads", "index_n_heads"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "kv_channels", "dim_head", "global_head_dim", "swa_head_dim"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim", "rotary_dim"], 16),
    **dict.fromkeys(
        ["linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "q_lora_rank", "kv_lora_rank"], 16
    ),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 256),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "bos_token_id"], 1),
    **dict.fromkeys(["mamba_d_state", "state_size", "index_topk", "mamba_n_heads", "floor_scale"], 8),
    "pad_token_id": 0,
    "eos_token_id": 2,
    "linear_num_value_heads": 4,
    "mamba_expand": 2,
    "no_rope_layer_interval": 2,
    "hidden_size_per_layer_input": 16,
}
OPTIONAL = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)  # set although the config's default is None
WINDOWS, NARROW = ("sliding_window", "attention_chunk_size", "window_size", "local_attention"), 8  # tokens
GLOBAL_ATTENTION = {"full_attention", "sliding_attention", "attention", "chunked_attention"}
KEPT_BACK: list[tuple[str, ...]] = [  # what a family's own checks may not let be changed
    (),
    ("sliding_window",),
    ("layer_types", "num_hidden_layers"),
    ("sliding_window", "layer_types", "num_hidden_layers"),
    ("head_dim", "num_key_value_heads", "num_attention_heads"),
    ("num_experts_per_tok",),
]


@dataclass(frozen=True)
class Outcome:
    """Result for one family.

    Attributes:
        family: its name in transformers.
        model: the class.
        status: "yes", "no" (refused), "not built" (no tiny configuration could be made) or "WRONG".
        tp: whether tensor parallelism cuts its layers.
        notes: what the tiny config changes beside sizes, or why it was refused.
    """

    family: str
    model: str
    status: str
    tp: str
    notes: str

    def row(self) -> str:
        """Return its line of the table."""
        return f"| {self.family} | {self.model} | {self.status} | {self.tp} | {self.notes} |"


def examine(family: str) -> Outcome:
    """Build a tiny model, capture it, and compare packed loss and gradients with the model on each sequence alone."""
    name = NAMES[family]
    try:
        model, changes = build(family)
    except Exception as error:  # a config's own checks may raise anything
        return Outcome(family, name, "not built", "", _line(f"{type(error).__name__}: {error}"))
    try:
        program = capture(model)
    except Unsupported as error:
        return Outcome(family, name, "no", "", _line(str(error)))
    wrong = difference(program, model)
    status = "yes" if wrong is None else "WRONG"
    return Outcome(family, name, status, _tensor_parallel(program), _line(wrong or ", ".join(changes)))


def build(family: str, plain: bool = True) -> tuple[nn.Module, list[str]]:
    """Return a tiny model with weights, and the settings that differ from the family's defaults beside sizes.

    Args:
        plain: without the windows, chunks, caps and router losses that the defaults have; else these are kept, windows
            and chunks as narrow as `NARROW`.
    """
    config, changes = shrink(CONFIG_MAPPING[family], plain)
    config._attn_implementation = "eager"
    kind = getattr(transformers, NAMES[family])
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its smallest configuration has {size} parameters")
    torch.manual_seed(0)
    model = kind(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean, deviation = (1.0, 0.1) if parameter.dim() == 1 else (0.0, 2.0 / math.sqrt(64))
            parameter.normal_(mean, deviation, generator=generator)
    return model.float(), changes


def shrink(kind: type[Any], plain: bool = True) -> tuple[Any, list[str]]:
    """Return a tiny config of a class, and what was changed beside sizes; without dropout, if plain without windows."""
    default = kind()
    given = {
        n: v for n, v in SIZES.items() if _has(default, n) and (isinstance(_read(default, n), int) or n in OPTIONAL)
    }
    if "kv_lora_rank" in given:  # latent attention has as many key/value heads as query heads
        given["num_key_value_heads"] = given["num_attention_heads"]
    switches = dict(_switches(default, plain))
    if not plain:
        given |= {n: NARROW for n in WINDOWS if _has(default, n) and isinstance(_read(default, n), int)}
    for name in getattr(kind, "sub_configs", None) or {}:
        if _read(default, name) is not None:
            given[name], inner = shrink(type(_read(default, name)), plain)
            switches |= {f"{name}.{change.partition('=')[0]}": change.partition("=")[2] for change in inner}
    errors = []
    for kept in KEPT_BACK:
        chosen = {n: v for n, v in {**given, **switches}.items() if n not in kept and "." not in n}
        try:
            changes = [f"{n}={_shown(v)}" for n, v in switches.items() if n not in kept and n not in SIZES]
            return kind(**chosen), changes
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _switches(default: Any, plain: bool) -> Iterator[tuple[str, Any]]:
    """Yield the settings that make a config fit, and where asked for its attention plain, where they do not."""
    for name, value in vars(default).items():
        if "drop" in name and isinstance(value, float) and value:
            yield name, 0.0
    kinds = _read(default, "layer_types") if _has(default, "layer_types") else None
    mixed = plain and bool(kinds) and set(kinds) <= GLOBAL_ATTENTION
    if mixed and set(kinds) != {"full_attention"}:
        yield "layer_types", ["full_attention"] * 2
    elif kinds:
        different = list(dict.fromkeys(kinds))
        yield "layer_types", (different * 2)[: max(2, len(different))]
        yield "num_hidden_layers", max(2, len(different))
    if plain and _has(default, "sliding_window") and not mixed:
        yield "sliding_window", None
    for name, value in (
        ("attn_logit_softcapping", None),
        ("use_sliding_window", False),
        ("output_router_logits", False),
    ):
        if plain and _has(default, name) and _read(default, name):
            yield name, value
    if _read(default, "is_decoder") is False:
        yield "is_decoder", True


def _has(config: Any, name: str) -> bool:
    """Say whether a config has a setting of its own under a name."""
    aliases = getattr(type(config), "attribute_map", None) or {}
    computed = isinstance(inspect.getattr_static(type(config), name, None), property)
    return name in vars(config) and name not in aliases and not computed


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # some settings are ambiguous where layers differ
        return None


def _shown(value: Any) -> str:
    return value[0] if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)


def difference(program: Program, model: nn.Module) -> str | None:
    """Say how a packed loss and its gradients differ from the model's on each sequence alone; None: they agree."""
    given, total = batch([5, 3, 9]), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = model(input_ids=given["input_ids"][:, a:b], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum", ignore_index=-100)
    found = loss(program, model, given)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected, gradients = _gradients(total, named.values()), _gradients(found, named.values())
    scale = torch.stack([g.norm() for g in expected]).norm()
    if not bool((found - total).abs() <= 1e-4 * total.abs()):
        return f"its loss is {float(found):.5f}, alone {float(total):.5f}"
    for name, one, other in zip(named, gradients, expected, strict=True):
        if not bool((one - other).norm() <= 1e-3 * other.norm() + 1e-4 * scale):
            return f"the gradient of {name} differs"
    return None


def _gradients(value: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, list(parameters), allow_unused=True, materialize_grads=True)


def _tensor_parallel(program: Program) -> str:
    try:
        refuse_uncut(program, Strategy.parse("<tp2,pp1>", layers=program.layers))
    except Unsupported as error:
        return f"no: {_line(error.what)}"
    return "yes" if any(_by_heads(program, p) for b in program.blocks[1:-1] for p in b.parameters) else "MLP only"


def _by_heads(program: Program, name: str) -> bool:
    rule = program.parameters[name].rule
    return rule is not None and rule.heads


def _line(text: str) -> str:
    """Return a text fit for a cell."""
    first = " ".join(text.split())
    return first[:157].replace("|", "/") + ("..." if len(first) > 157 else "")


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the generated part of docs/support.md."""
    rows = sorted(outcomes, key=lambda o: (o.status != "yes", o.status, o.family))
    head = ["| family | class | captured | tensor parallel | settings, or why not |", "|---|---|---|---|---|"]
    return "\n".join([BEGIN.format(transformers.__version__), "", *head, *(o.row() for o in rows), "", END])


def documented() -> tuple[str, dict[str, str]]:
    """Return the transformers version of the table in docs/support.md, and its rows by family."""
    start, end = BEGIN.split("{}")
    version, _, rest = DOCS.read_text().partition(start)[2].partition(end)
    rows = [
        line
        for line in rest.partition(END)[0].splitlines()
        if line.startswith("| ") and not line.startswith("| family")
    ]
    return version, {line.split(" | ")[0].removeprefix("| "): line for line in rows}


def update(run: Callable[[str], Outcome] = examine) -> None:
    """Write the table of all families."""
    text = DOCS.read_text()
    before, _, rest = text.partition(BEGIN.split("{}")[0])
    after = rest.partition(END)[2] if rest else ""
    DOCS.write_text(before.rstrip("\n") + "\n\n" + table(map(run, NAMES)) + (after or "\n"))
