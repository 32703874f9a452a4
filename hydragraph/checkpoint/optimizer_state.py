"""Optimizer state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hydragraph.errors import Unsupported
from hydragraph.kernels.adamw import AdamW, refuse_amsgrad
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.shard_boxes import OwnedBoxes, sharded

_PREFIX = "optimizer."


@dataclass(frozen=True)
class UnshardedState:
    """Unsharded part of an optimizer's state.

    Attributes:
        scalars: values by parameter name and state name, for parameters that this rank owns at least in part.
    """

    groups: list[list[str]]
    hyperparameters: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


def kind_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer).__name__


def plain_state(home: HomeState, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    unstored = ("params", "param_names")
    hyperparameters = [{k: v for k, v in g.items() if k not in unstored} for g in optimizer.param_groups]
    scalars: dict[str, dict[str, Any]] = {}
    for name, state, value in _states(home, optimizer):
        if not isinstance(value, Tensor) or value.dim() == 0:
            scalars.setdefault(name, {})[state] = value.detach().cpu() if isinstance(value, Tensor) else value
    return vars(UnshardedState(_group_names(home, optimizer), hyperparameters, scalars))


def elementwise_states(home: HomeState, optimizer: torch.optim.Optimizer | None) -> dict[str, OwnedBoxes]:
    states = {}
    for name, state, value in _states(home, optimizer) if optimizer is not None else ():
        if isinstance(value, Tensor) and value.dim():
            states[state_key(state, name)] = sharded(home.pieces[name], value, once=True)
    return states


def merged(parts: Sequence[UnshardedState]) -> UnshardedState:
    """Merge all ranks' unsharded states; all owners of a parameter must have equal scalars."""
    scalars: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        for name, values in part.scalars.items():
            earlier = scalars.setdefault(name, values)
            if earlier.keys() != values.keys() or any(bool(earlier[k] != values[k]) for k in earlier):
                raise ValueError(
                    f"the optimizer state of {name} is {values} on rank {rank}, but {earlier} on an earlier rank: run"
                    " the same optimizer steps on all ranks"
                )
    return UnshardedState(parts[0].groups, parts[0].hyperparameters, scalars)


def allocated(metadata: Metadata, home: HomeState) -> dict[str, dict[str, Tensor]]:
    """Allocate this rank's part of the stored elementwise states, as 1-D tensors by parameter and state name."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        state, _, name = key.removeprefix(_PREFIX).partition(".")
        if isinstance(stored, TensorStorageMetadata) and key not in home.pieces and name in home.pieces:
            room = torch.empty_like(home.parameters[name], dtype=stored.properties.dtype, requires_grad=False)
            states.setdefault(name, {})[state] = room
    return states


def check_groups(what: str, home: HomeState, optimizer: torch.optim.Optimizer, plain: UnshardedState) -> None:
    """Refuse parameter groups other than the saved ones, and saved settings that the optimizer does not support."""
    groups = _group_names(home, optimizer)
    if [sorted(names) for names in groups] != [sorted(names) for names in plain.groups]:
        moved = _places(groups).items() ^ _places(plain.groups).items()
        raise ValueError(
            f"{what}: the saved optimizer has {len(plain.groups)} parameter groups, and this optimizer has"
            f" {len(groups)}; parameters in different groups: {sorted({name for name, _ in moved})[:3]}: build the"
            " optimizer with the saved groups"
        )
    for saved in plain.hyperparameters if isinstance(optimizer, AdamW) else ():
        refuse_amsgrad(saved)


def restore(
    what: str,
    home: HomeState,
    optimizer: torch.optim.Optimizer,
    plain: UnshardedState,
    states: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Restore state into this rank's optimizer, in place; `states` has 1-D tensors by parameter and state name."""
    check_groups(what, home, optimizer, plain)
    groups = _group_names(home, optimizer)
    # Parameters never stepped have no state, and must not get an empty one.
    stepped = {name for name in home.pieces if states.get(name) or plain.scalars.get(name)}
    optimizer.load_state_dict(
        {
            "state": {name: {**plain.scalars.get(name, {}), **states.get(name, {})} for name in stepped},
            "param_groups": [
                {**values, "params": names} for values, names in zip(plain.hyperparameters, groups, strict=True)
            ],
        }
    )


def state_key(state: str, parameter: str) -> str:
    return f"{_PREFIX}{state}.{parameter}"


def _states(home: HomeState, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, str, Any]]:
    for name, parameter in home.parameters.items():
        for state, value in optimizer.state.get(parameter, {}).items() if parameter.numel() else ():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise Unsupported(
                    f"state {state} has shape {tuple(value.shape)}, but the shard has {parameter.numel()} elements",
                    where=f"optimizer {type(optimizer).__name__}, parameter {name}",
                    remedy="use an optimizer whose states have one value per element or per parameter",
                )
            yield name, state, value


def _group_names(home: HomeState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in home.parameters.items()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _places(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: place for place, names in enumerate(groups) for name in names}
