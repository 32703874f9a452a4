"""Ways in which models were once changed without a word, or failed obscurely, and the tests that hold each.

A row says what a model or a caller does, what is promised of it ("right": as on one device; "refused": by name, with a
remedy; "either"), and where that is tested: file, function, and a text that shows the case there.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
Place = tuple[str, str, str]  # file, function, a text in that file

WAYS: dict[str, tuple[str, Place]] = {
    # In ordinary use.
    "frozen parameters": ("right", ("test_trainable.py", "test_lopsided_strategies_equal_one_device", "still")),
    "frozen parameters in the norm that clips": (
        "right",
        ("test_trainable.py", "test_lopsided_strategies_equal_one_device", "max(norms) > CLIP"),
    ),
    "a cut weight or bias that is used elsewhere, too": (
        "right",
        ("passes/test_find_cuts_readers.py", "test_readers_in_any_combination", "the norm of a column weight"),
    ),
    "a cut table that is looked up twice, or read by row": (
        "right",
        ("passes/test_find_cuts_readers.py", "test_readers_of_the_embedding", "self.embed.weight[0]"),
    ),
    "tables of unequal rows": (
        "right",
        ("passes/test_find_cuts_readers.py", "test_what_is_read_alike_is_still_cut", '"positions.weight"'),
    ),
    "ids and labels outside the tables": (
        "refused",
        (
            "frontend/test_mini_batch.py",
            "test_values_outside_are_refused_at_every_degree_and_padded_batches_are_cut",
            "-1 at",
        ),
    ),
    "a hidden state of another dtype between stages": (
        "right",
        ("runtime/test_hidden_dtype.py", "test_pipelines_move_hidden_states_as_they_are", "fp32 under bf16"),
    ),
    "chunked attention that the mask alone says": (
        "right",
        ("frontend/test_mask_patterns.py", "test_windows_and_chunks_are_supported_in_their_direction", "CHUNKS"),
    ),
    "sliding windows that the mask alone says": (
        "right",
        ("frontend/check/test_numeric_check.py", "test_a_window_that_only_the_mask_makes_is_captured", "full"),
    ),
    "a block's forward that was set on the instance": (
        "right",
        (
            "frontend/test_untraceable.py",
            "test_forwards_of_instances_and_parametrizations_are_honoured",
            "types.MethodType",
        ),
    ),
    # Layers that were taken for equal.
    "private attributes": (
        "right",
        ("frontend/test_block_equivalence.py", "test_layers_that_differ_are_never_taken_for_equal", "b._h"),
    ),
    "hooks on submodules": (
        "refused",
        ("frontend/test_untraceable.py", "test_hooks_are_refused_by_name", "stack[1].down.reg"),
    ),
    "closures and bound methods": (
        "right",
        ("frontend/test_block_equivalence.py", "test_layers_that_differ_are_never_taken_for_equal", "b.bound(1.0)"),
    ),
    "classes made in a function": (
        "right",
        ("frontend/test_block_equivalence.py", "test_layers_that_differ_are_never_taken_for_equal", "b.made(1.0)"),
    ),
    "uses of a layer's index": (
        "right",
        ("frontend/test_block_equivalence.py", "test_layers_that_differ_are_never_taken_for_equal", "2**b.layer_idx"),
    ),
    "objects of equal text": (
        "right",
        ("frontend/test_block_equivalence.py", "test_layers_that_differ_are_never_taken_for_equal", "b.setting.value"),
    ),
    "a program of a model that differs out of sight": (
        "refused",
        (
            "frontend/test_block_equivalence.py",
            "test_a_program_of_a_model_that_differs_out_of_sight_is_refused",
            "program=",
        ),
    ),
    # Code that a trace loses.
    "backwards of autograd.Function": (
        "refused",
        ("frontend/test_untraceable.py", "test_what_a_block_does_unseen_is_refused_by_name", "Reversed.apply"),
    ),
    "gradient hooks": (
        "refused",
        ("frontend/test_untraceable.py", "test_hooks_are_refused_by_name", "a gradient hook"),
    ),
    "buffers assigned in forward": (
        "refused",
        ("frontend/test_untraceable.py", "test_what_a_block_does_unseen_is_refused_by_name", "(assigned, r"),
    ),
    "parameters that the loss does not reach": (
        "right",
        ("test_trainable.py", "test_lopsided_strategies_equal_one_device", "weight_decay=0.1"),
    ),
    "scale_grad_by_freq": (
        "refused",
        (
            "frontend/test_untraceable.py",
            "test_modules_that_look_at_a_whole_batch_and_wrappers_are_refused",
            "scale_grad_by_freq=True",
        ),
    ),
    "tokens that meet": (
        "refused",
        (
            "frontend/test_custom_modules.py",
            "test_whatever_is_not_known_to_keep_tokens_apart_is_refused",
            "F.normalize(x, dim=1)",
        ),
    ),
    "positions counted through a row": (
        "right",
        ("frontend/test_counted_positions.py", "test_positions_start_anew_in_each_sequence", "torch.arange(n"),
    ),
    "state of Python's": (
        "refused",
        ("frontend/test_block_equivalence.py", "test_state_outside_of_a_block_is_refused", "CALLS[0] += 1"),
    ),
    "a loss that is a mean": ("refused", ("frontend/test_loss_reduction.py", "test_a_mean_is_refused", "mean")),
    "padding ids inside sequences": (
        "right",
        ("frontend/test_unplaced.py", "test_padding_ids_inside_sequences_are_right", "Roberta"),
    ),
    # In data and configs.
    "text files beside pairs": (
        "refused",
        (
            "train/test_data.py",
            "test_text_files_are_refused_beside_records_of_a_format_that_texts_cannot_have",
            '"preference"',
        ),
    ),
    "later corpora of a mixture in an evaluation": (
        "right",
        ("train/test_data.py", "test_each_corpus_of_a_mixture_is_evaluated", "len(batches) == 4"),
    ),
    "formats and fields beside a mixture": (
        "refused",
        ("train/test_config.py", "test_fields_of_one_corpus_are_refused_beside_a_mixture", '"suffixes": [".md"]'),
    ),
    "settings for generation in exports": (
        "right",
        (
            "train/test_huggingface_export.py",
            "test_settings_for_generation_are_those_of_the_models_directory",
            "temperature=0.3",
        ),
    ),
    # What crashed obscurely.
    "parameters that no block uses": (
        "right",
        ("test_trainable.py", "test_lopsided_strategies_equal_one_device", "unreached and unused"),
    ),
    "a deviation over features": (
        "right",
        ("passes/test_written_in_place.py", "test_gradients_equal_the_models_own", "h.std(-1"),
    ),
    "buffers written in place, batch norm, max_norm": (
        "refused",
        ("frontend/test_untraceable.py", "test_what_a_block_does_unseen_is_refused_by_name", "(added, r"),
    ),
    "ids that are not contiguous, and of 32 bits": (
        "right",
        (
            "frontend/test_mini_batch.py",
            "test_values_outside_are_refused_at_every_degree_and_padded_batches_are_cut",
            "plain[1].int()",
        ),
    ),
    "a refused strategy in a step": (
        "refused",
        ("test_refusals.py", "test_refusals_between_steps_change_nothing", "exact"),
    ),
    "an integer parameter": (
        "refused",
        ("frontend/test_trainable_parameters.py", "test_parameters_that_are_no_floats_are_refused", "int"),
    ),
    "autocast, reentrant checkpointing": (
        "refused",
        ("frontend/test_untraceable.py", "test_what_a_block_does_unseen_is_refused_by_name", "use_reentrant=True"),
    ),
    "a loss of shape [1]": (
        "right",
        ("frontend/test_untraceable.py", "test_a_loss_of_shape_one_is_a_number", "reshape(1, 1)"),
    ),
    # Features that users expect, but that were refused or crashed.
    "dynamic NTK and longrope": (
        "either",
        (
            "frontend/test_length_dependent_rotary.py",
            "test_each_sequence_has_the_frequencies_of_its_own_length",
            '"longrope"',
        ),
    ),
    "directories in original formats": (
        "either",
        (
            "checkpoint/weights/test_original_formats.py",
            "test_an_original_directory_gives_the_models_tensors_or_is_refused",
            '"qwen2_moe"',
        ),
    ),
    "batches with an attention mask": (
        "either",
        ("spec/test_padded.py", "test_other_masks_are_refused", "BatchEncoding"),
    ),
    "families that are captured and fail when trained": (
        "either",
        ("frontend/test_trained.py", "test_nothing_in_the_table_is_wrong", "CRASH"),
    ),
    "parameters of several dtypes": (
        "either",
        (
            "frontend/test_mixed_dtypes.py",
            "test_casts_to_a_fixed_dtype_are_refused_with_the_parameter",
            "torch.float64",
        ),
    ),
}


@cache
def functions(file: str) -> frozenset[str]:
    """Return the names of a file's functions."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_has_a_test(way: str) -> None:
    promise, (file, function, text) = WAYS[way]
    assert promise in ("right", "refused", "either")
    assert function in functions(file), f"{file} has no {function}: say where {way} are tested now"
    assert text in (TESTS / file).read_text(encoding="utf-8"), f"{file} shows no {text!r}"
