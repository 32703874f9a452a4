"""Config of losses that compare pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from hydragraph.train.field_checks import CheckedFields, Fraction, Number, check_number


def _check_scale(name: str, value: object) -> None:
    check_number(name, value)
    if not value:
        raise ValueError(f"{name!r} is 0, which makes every gradient zero: give a number above 0")


Scale = Annotated[float, _check_scale]


@dataclass(frozen=True)
class DpoConfig(CheckedFields):
    """Direct preference optimization (Rafailov et al., 2023, eq. 7): -log sigmoid of the reward difference.

    The reward of an answer is beta * (log p - log p_ref), where p_ref is the probability before training.

    Attributes:
        beta: how strongly the loss keeps the model close to the model before training.
        label_smoothing: assumed fraction of pairs whose answers are swapped (conservative DPO).
    """

    beta: Scale = 0.1
    label_smoothing: Fraction = 0.0


@dataclass(frozen=True)
class SimpoConfig(CheckedFields):
    """Simple preference optimization (Meng et al., 2024, eq. 6): rewards per token, without a reference model.

    The reward of an answer is beta * log p / tokens. The preferred answer's reward should be higher by gamma.

    Attributes:
        beta: scale of the rewards.
        gamma: target difference between the rewards of the preferred and the rejected answer.
    """

    beta: Scale = 2.0
    gamma: Number = 1.0


@dataclass(frozen=True)
class OrpoConfig(CheckedFields):
    """Odds ratio preference optimization (Hong et al., 2024, eq. 6): cross-entropy of the preferred answer plus
    odds-ratio loss.

    The odds of an answer are p / (1 - p), where p is the geometric mean of the answer's token probabilities.

    Attributes:
        weight: weight of the odds-ratio loss (lambda in the paper).
    """

    weight: Number = 0.1


PairLoss = DpoConfig | SimpoConfig | OrpoConfig


@dataclass(frozen=True)
class ObjectiveConfig:
    """A loss that compares preferred with rejected answers. Set exactly one field; a name alone selects the defaults.

    Attributes:
        dpo: direct preference optimization, with the model before training as reference.
        simpo: simple preference optimization, without a reference model.
        orpo: odds ratio preference optimization, which also fine-tunes on the preferred answers.
    """

    dpo: DpoConfig | None = None
    simpo: SimpoConfig | None = None
    orpo: OrpoConfig | None = None

    def __post_init__(self) -> None:
        objectives = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(objectives) != 1:
            what = "is empty" if not objectives else f"has {' and '.join(objectives)}"
            raise ValueError(f"'objective' {what}: give one of dpo, simpo and orpo, such as {{dpo: {{beta: 0.1}}}}")

    @classmethod
    def parse(cls, text: str) -> ObjectiveConfig:
        losses = {"dpo": DpoConfig, "simpo": SimpoConfig, "orpo": OrpoConfig}
        if text not in losses:
            raise ValueError(f"'objective' is {text!r}: use {' or '.join(losses)}")
        chosen: dict[str, Any] = {text: losses[text]()}
        return cls(**chosen)

    @property
    def loss(self) -> PairLoss:
        loss = self.dpo or self.simpo or self.orpo
        assert loss is not None, "exactly one objective is set"
        return loss

    @property
    def needs_reference(self) -> bool:
        return self.dpo is not None
