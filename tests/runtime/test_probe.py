"""The probe of an idle device: it ends in time, and counts."""

from __future__ import annotations

import time

import torch

from hydragraph.runtime.probe import Probe


def test_a_probe_counts_products_for_a_bounded_time() -> None:
    probe = Probe(torch.device("cpu"))
    assert probe() == 0.0
    probe.most_s = 0.02
    began = time.process_time()
    assert probe() > 0
    assert time.process_time() - began < 5
