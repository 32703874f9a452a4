"""Cache of captured programs: equal library models are traced once, and anything that may differ is traced anew."""

from __future__ import annotations

import functools
from pathlib import Path
from types import MethodType
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend import capture as frontend
from hydragraph.frontend.compiled_folder.program_cache import PROGRAMS, path_of
from hydragraph.frontend.compiled_folder.program_records import program_data
from hydragraph.frontend.packed_inputs import Loss, token_cross_entropy
from hydragraph.frontend.user_cache import folder
from hydragraph.ir.program import Program
from tests.models import llama, mixtral
from tests.own_models import Own
from tests.thorough import first, only


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@functools.cache
def of_one_layer() -> Program:
    with mock.patch.object(frontend, "path_of", return_value=None):
        return frontend.capture(llama(layers=1))


@pytest.fixture
def traced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give for each trace of a Llama of one layer what the first one gave."""
    program = of_one_layer()
    monkeypatch.setattr(frontend, "_captured", lambda *_: program)


def capture(model: nn.Module, traces: bool, **options: object) -> Program:
    """Capture, and check whether that traced the model."""
    with mock.patch.object(frontend, "_captured", wraps=frontend._captured) as traced:
        program = frontend.capture(model, **options)  # pyrefly: ignore[bad-argument-type]
    assert traced.called == traces
    return program


@pytest.mark.parametrize("make", first([llama], [llama, mixtral]), ids=["llama", "mixtral"])
def test_a_program_that_is_read_is_the_one_that_was_traced(make: type[nn.Module]) -> None:
    made, read = capture(make(), traces=True), capture(make(), traces=False)
    assert program_data(read) == program_data(made)
    assert list(read.parameters) == list(made.parameters)
    assert read.fingerprint == made.fingerprint


def place(model: nn.Module, dtype: torch.dtype = torch.float32, loss: Loss | None = None) -> Path | None:
    return path_of(model, dtype, None, loss, None)


def test_another_model_dtype_or_setting_has_another_place() -> None:
    frozen, changed = llama(layers=1), llama(layers=1)
    frozen.lm_head.weight.requires_grad_(False)
    changed.model.norm.variance_epsilon = 1e-3  # pyrefly: ignore[bad-argument-type]
    places = [place(llama(layers=1)), place(llama(layers=1), torch.bfloat16), place(frozen), place(changed)]
    assert None not in places
    assert len(set(places)) == 4
    assert places[0] == place(llama(layers=1))


def test_adapters_are_kept_by_their_settings_and_state() -> None:
    peft = pytest.importorskip("peft")

    def adapted(**settings: object) -> nn.Module:
        return peft.get_peft_model(llama(layers=1), peft.LoraConfig(target_modules=["q_proj"], **settings))

    rescaled, off = adapted(), adapted()
    rescaled.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").scaling["default"] = 3.0
    off.get_submodule("base_model").disable_adapter_layers()
    places = [place(model) for model in (adapted(), adapted(r=4), adapted(lora_dropout=0.1), rescaled, off)]
    assert None not in places
    assert len(set(places)) == 5
    assert places[0] == place(adapted())


def test_a_method_of_an_instance_counts_with_its_code() -> None:
    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * x

    places = [place(llama(layers=1))]
    for function in (doubled, functools.wraps(doubled)(lambda self, x: 3 * x)):
        model = llama(layers=1)
        model.model.norm.extra = MethodType(function, model.model.norm)  # pyrefly: ignore[bad-argument-type]
        places.append(place(model))
    closing = llama(layers=1)
    closing.model.norm.extra = MethodType(lambda self, x: x * places[0], closing.model.norm)  # pyrefly: ignore[bad-argument-type]
    assert place(closing) is None
    assert len({*places}) == len(places)


def test_what_is_not_a_librarys_own_is_never_kept() -> None:
    def loss(outputs: object, batch: dict[str, Tensor]) -> Tensor:
        return token_cross_entropy(outputs, batch)

    class Norm(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, hidden: Tensor) -> Tensor:
            return self.norm(hidden)

    changed = llama(layers=1)
    changed.model.norm = Norm(changed.model.norm)  # pyrefly: ignore[bad-argument-type, method-assign]
    assert place(Own()) is None
    assert place(llama(layers=1), loss=loss) is None
    assert place(changed) is None


def doubled(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return 2 * q, 2 * k


@only("function")
@pytest.mark.parametrize(
    ("place", "patch"),
    [
        ("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", doubled),
        ("transformers.models.llama.modeling_llama.rotate_half", functools.partial(torch.mul, -1)),
        ("transformers.models.llama.modeling_llama.LlamaMLP.forward", lambda self, x: self.down_proj(self.up_proj(x))),
        ("torch.nn.functional.linear", lambda x, weight, bias=None: 2 * x @ weight.t()),
    ],
    ids=["function", "partial", "method", "torch"],
)
@pytest.mark.usefixtures("traced_before")
def test_a_patched_library_is_traced_whatever_is_kept(place: str, patch: object) -> None:
    capture(llama(layers=1), traces=True)
    with mock.patch(place, patch):
        capture(llama(layers=1), traces=True)
    capture(llama(layers=1), traces=False)


@pytest.mark.usefixtures("traced_before")
def test_a_kept_program_belongs_to_the_model_that_it_is_read_for() -> None:
    """`compile(program=)` compares origins, and an origin may name objects of the process that traced."""
    for traces in (True, False):
        model = llama(layers=1)
        assert capture(model, traces=traces).origin == frontend.origin(model)


@pytest.mark.usefixtures("traced_before")
def test_what_is_refused_before_the_trace_is_refused_as_well_if_a_program_is_kept() -> None:
    capture(llama(layers=1), traces=True)
    hooked = llama(layers=1)
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="hook"):
        frontend.capture(hooked)


@pytest.mark.usefixtures("traced_before")
def test_a_damaged_file_is_written_anew() -> None:
    made = capture(llama(layers=1), traces=True)
    (file,) = folder(PROGRAMS).iterdir()
    written = file.read_bytes()
    for content in (written[: len(written) // 2], b"y" + written[1:]):
        file.write_bytes(content)
        assert program_data(capture(llama(layers=1), traces=True)) == program_data(made)
        assert file.read_bytes() == written
