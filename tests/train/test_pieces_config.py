"""Places of checkpoints in pieces in a config: settings that make no sense are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from tests.train.plain import settings


@pytest.mark.parametrize(
    ("checkpoint", "sentence"),
    [
        ({"pieces": {"peers": False}}, "checkpoint.pieces: 'peers' is false, and 'local' and 'shared' are not set"),
        ({"pieces": {"local": 3}}, "checkpoint.pieces: 'local' is 3: give a non-empty string"),
        ({"pieces": {}, "every": 0}, "checkpoint: 'every' is 0: give a whole number of at least 1"),
        ({"every": 5}, "checkpoint: 'every' is 5, .* set 'pieces', or use checkpoint_every"),
    ],
)
def test_settings_that_make_no_sense_are_named(tmp_path: Path, checkpoint: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_record(TrainConfig, {**settings(tmp_path), "checkpoint": checkpoint})
