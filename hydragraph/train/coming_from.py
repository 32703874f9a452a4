"""The config fields of other frameworks, and what to write instead: `docs/coming_from.md` and errors say the same."""

from __future__ import annotations

from collections.abc import Iterator

_RECOMPUTE = (
    "write `r` after a stage or a pipeline, as in `<tp1,pp1>r`, and its layers are recomputed; `r0.5` keeps half of "
    "what they save"
)
_BATCH = "`data.tokens_per_step`, the tokens of a whole mini-batch; micro-batches and accumulation follow from memory"
_LENGTH = "`data.max_length`"
_PACK = "leave it out: sequences are always packed, without padding and without attention between them"
_QUANTIZED = "not supported: quantized base weights (QLoRA) and 8-bit optimizers"
_DTYPE = "`dtype: bfloat16`; weights, sums and optimizer state stay fp32, and fp16 and fp8 are not supported"
_TRACKER = "`metrics.jsonl` and TensorBoard in the run folder; other trackers through `callbacks`"
_EXPERT = "not supported: context parallelism and expert parallelism"
_PREFERENCE = "`objective`: {dpo: {beta: 0.1}}, simpo or orpo, with `chosen` and `rejected` in the data"
_LORA_DROPOUT = "`adapter.lora.dropout`"
_LOADER = "leave it out: token files are prepared once by one process of each host, and read by all"
_KERNEL = "leave it out: attention over packed sequences uses the kernel that the device has"
_SHARDING = "leave it out: weights, gradients and optimizer state are always spread over ranks, as `home` says"
_OPTIMIZER = "`optimizer.name`, a class of torch.optim such as AdamW; its settings are fields of `optimizer`"
_SCHEDULE = "`schedule.decay`: cosine, linear, constant or wsd; see also `schedule.warmup` and `schedule.min_lr_ratio`"
_SEVERAL = "`strategies`, which gives each pipeline and stage its own degree, as in `2*<tp4,pp2>`"
_PATIENCE = "`patience`, evaluations in a row without a lower loss"
_BEST = "`keep_best`: the checkpoint with the lowest evaluation loss stays, and the run's `model` is made of it"
_SMOOTHING = "`label_smoothing`; evaluations are smoothed too, as the Trainer's are"
_LIMIT = "`data.max_samples`, the first documents of a corpus; of a mixture, a field of each corpus"
_HUB = "not supported: hubs are not written to; the run folder's `model` is what `from_pretrained` reads"
_TEMPLATE = "`data.chat_template`: the file of a Jinja template, the template itself, or `chatml`"
_CLIP = "`max_grad_norm`"
_STREAMING = (
    "not supported: documents are tokenised once, into files; write the part you need to a `.jsonl` first, or limit a "
    "corpus with `data.max_samples`"
)

# By framework, the fields of its config files (also those that stand in a section) and what is written here instead.
FRAMEWORKS: dict[str, dict[tuple[str, ...], str]] = {
    "the Trainer's arguments": {
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"): _BATCH,
        ("gradient_checkpointing", "gradient_checkpointing_kwargs"): _RECOMPUTE,
        ("num_train_epochs",): "`epochs`",
        ("max_steps",): "`steps`",
        ("learning_rate",): "`optimizer.lr`",
        ("weight_decay",): "`optimizer.weight_decay`; biases and norm weights do not decay",
        ("adam_beta1", "adam_beta2"): "`optimizer.betas`, a list of two",
        ("adam_epsilon",): "`optimizer.eps`",
        ("optim",): _OPTIMIZER,
        ("lr_scheduler_type", "lr_scheduler_kwargs"): _SCHEDULE,
        ("warmup_steps",): "`schedule.warmup`",
        ("warmup_ratio",): "`schedule.warmup_ratio`",
        ("bf16", "fp16", "tf32"): _DTYPE,
        ("output_dir", "logging_dir"): "`output`, the run folder",
        ("save_steps",): "`checkpoint_every`",
        ("eval_steps",): "`evaluate_every`",
        ("save_strategy",): "`checkpoint_every`, in steps, or `checkpoint_per_epoch`",
        ("eval_strategy", "evaluation_strategy"): "`evaluate_every`, in steps, or `evaluate_per_epoch`",
        ("save_total_limit",): "`keep`",
        ("resume_from_checkpoint",): "`hydragraph train --resume`, or `--resume-from step-N`",
        ("overwrite_output_dir",): "`hydragraph train --overwrite`",
        ("load_best_model_at_end",): _BEST,
        (
            "metric_for_best_model",
            "greater_is_better",
        ): "leave it out: the best checkpoint is that with the lowest evaluation loss (`keep_best`)",
        ("label_smoothing_factor",): _SMOOTHING,
        ("report_to", "logging_steps", "run_name"): _TRACKER,
        ("fsdp", "fsdp_config", "deepspeed"): _SHARDING,
        ("group_by_length",): _PACK,
        ("dataloader_num_workers", "dataloader_pin_memory"): _LOADER,
        ("torch_compile",): "`backend: inductor`, the default on a GPU",
        ("push_to_hub", "hub_model_id"): _HUB,
        ("data_seed",): "`seed`, of a new model's weights and of the order of the data",
        ("neftune_noise_alpha",): "not supported: embeddings get no noise",
        ("attn_implementation",): _KERNEL,
    },
    "axolotl": {
        ("base_model",): "`model.path`, a local directory",
        ("model_type", "tokenizer_type"): "leave it out: both are read from the directory in `model.path`",
        ("tokenizer_config",): "`data.tokenizer`",
        ("datasets",): "`data.paths`, or `data.mixture` for several with weights; `data.format` says what records hold",
        ("test_datasets",): "`data.evaluation`",
        ("dataset_prepared_path",): "`data.cache`",
        ("val_set_size",): "`data.heldout`",
        ("sequence_len",): _LENGTH,
        ("streaming", "pretraining_dataset"): _STREAMING,
        ("sample_packing", "eval_sample_packing", "pad_to_sequence_len"): _PACK,
        ("micro_batch_size",): _BATCH,
        ("num_epochs",): "`epochs`",
        ("lr_scheduler",): _SCHEDULE,
        ("load_in_4bit", "load_in_8bit"): _QUANTIZED,
        ("lora_r", "lora_alpha"): "`adapter: {lora: {r: 16, alpha: 32}}`",
        ("lora_target_modules", "lora_target_linear"): "`adapter.lora.targets`, names or `all-linear`",
        ("lora_modules_to_save",): "`adapter.lora.modules_to_save`",
        ("lora_dropout",): _LORA_DROPOUT,
        ("train_on_inputs", "roles_to_train"): "`data.train_on`: assistant, last or all",
        ("chat_template",): _TEMPLATE,
        ("flash_attention", "sdp_attention", "xformers_attention"): _KERNEL,
        ("evals_per_epoch",): "`evaluate_per_epoch`",
        ("saves_per_epoch",): "`checkpoint_per_epoch`",
        ("early_stopping_patience",): _PATIENCE,
        ("wandb_project", "wandb_entity", "mlflow_experiment_name"): _TRACKER,
        ("tensor_parallel_size", "dp_shard_size"): _SEVERAL,
        ("context_parallel_size", "sequence_parallel_degree"): _EXPERT,
        ("special_tokens", "tokens"): "not supported: save the tokenizer with its special tokens, and resize the model",
        ("rl", "dpo_beta"): _PREFERENCE,
        ("plugins",): "not supported: hooks are `callbacks`",
    },
    "LLaMA-Factory": {
        ("model_name_or_path",): "`model.path`, a local directory",
        ("adapter_name_or_path",): "not supported: merge the adapter first, then name the directory in `model.path`",
        ("stage", "pref_beta", "pref_loss"): _PREFERENCE,
        (
            "do_train",
            "do_eval",
            "do_predict",
        ): "leave it out: `hydragraph train` trains, and `evaluate_every` evaluates",
        ("finetuning_type",): "`adapter: {lora: {}}` for lora, no `adapter` for full; no field freezes layers",
        ("lora_rank",): "`adapter.lora.r`",
        ("lora_target",): "`adapter.lora.targets`, names or `all-linear`",
        ("additional_target",): "`adapter.lora.modules_to_save`",
        ("use_rslora",): "`adapter.lora.rslora`",
        ("use_dora",): "`adapter.lora.dora`",
        ("dataset", "dataset_dir"): "`data.paths`, local files and directories; `data.format` says what records hold",
        ("eval_dataset",): "`data.evaluation`",
        ("template",): _TEMPLATE,
        ("cutoff_len",): _LENGTH,
        ("max_samples",): _LIMIT,
        ("streaming", "buffer_size"): _STREAMING,
        ("val_size",): "`data.heldout`",
        ("mix_strategy", "interleave_probs"): "`data.mixture`, whose corpora have a `weight` each",
        ("packing", "neat_packing"): _PACK,
        ("train_on_prompt",): "`data.train_on: all`",
        ("mask_history",): "`data.train_on: last`",
        ("preprocessing_num_workers", "overwrite_cache", "tokenized_path"): _LOADER,
        ("quantization_bit", "quantization_method"): _QUANTIZED,
        ("use_galore", "use_badam", "use_apollo", "use_muon"): "not supported: optimizers update elements one by one",
        ("pure_bf16",): _DTYPE,
        ("flash_attn", "enable_liger_kernel", "use_unsloth"): _KERNEL,
        ("plot_loss",): "leave it out: the run folder has `loss.png`, where matplotlib is installed",
        ("ddp_timeout",): "`progress_s`",
    },
    "DeepSpeed": {
        ("train_batch_size", "train_micro_batch_size_per_gpu"): _BATCH,
        ("zero_optimization", "zero_allow_untested_optimizer"): _SHARDING,
        ("gradient_clipping",): _CLIP,
        ("scheduler",): _SCHEDULE,
        ("fp16", "bf16", "amp"): _DTYPE,
        ("activation_checkpointing",): _RECOMPUTE,
        ("communication_data_type",): "`push_dtype`",
        ("tensor_parallel", "pipeline"): _SEVERAL,
        ("offload_optimizer", "offload_param", "aio"): "not supported: state stays in the memory of the devices",
        ("steps_per_print", "wall_clock_breakdown", "wandb", "tensorboard"): _TRACKER,
        ("flops_profiler",): "`hydragraph profile`, and `hydragraph train --trace`",
        ("elasticity",): "`elastic`",
    },
    "torchtitan": {
        ("job",): "`output`, the run folder",
        ("training",): "`steps`, `seed`, `max_grad_norm`, `data.tokens_per_step` and `data.max_length`",
        ("parallelism", "tensor_parallel_degree", "pipeline_parallel_degree"): _SEVERAL,
        ("data_parallel_shard_degree", "data_parallel_replicate_degree"): _SHARDING,
        ("context_parallel_degree", "expert_parallel_degree"): _EXPERT,
        ("pipeline_parallel_schedule",): (
            "a schedule after the pipelines, as in `<tp1,pp4> zb-h1`; interleaved stages are `<tp1,pp4,v2>`"
        ),
        ("local_batch_size", "global_batch_size"): _BATCH,
        ("seq_len",): _LENGTH,
        ("max_norm",): _CLIP,
        ("lr_scheduler",): _SCHEDULE,
        ("decay_ratio",): "`schedule.decay_ratio`, with `schedule.decay: wsd`",
        ("activation_checkpoint",): _RECOMPUTE,
        ("compile",): "`backend: inductor`, the default on a GPU",
        ("float8", "mx", "quantize"): _DTYPE,
        ("metrics", "profiling"): _TRACKER,
        ("fault_tolerance",): "`elastic`",
        ("interval",): "`checkpoint_every`",
        ("keep_latest_k",): "`keep`",
        ("async_mode",): "`checkpoint: {asynchronous: true}`",
        ("initial_load_path",): "`model.path` or `model.weights`, a directory of Hugging Face's form",
        ("hf_assets_path", "tokenizer_path"): "`data.tokenizer`",
        ("flavor",): "`model.architecture` with its sizes in `model.config`",
    },
    "nanotron": {
        ("general",): "`seed` and `output`",
        ("parallelism",): _SEVERAL,
        ("tokens",): "`steps`, `data.tokens_per_step` and `data.max_length`",
        ("micro_batch_size", "batch_accumulation_per_replica"): _BATCH,
        ("sequence_length",): _LENGTH,
        ("train_steps",): "`steps`",
        ("data_stages",): "not supported: a run has one mixture, `data.mixture`; start a run for each stage",
        ("checkpoints", "checkpoint_interval"): "`checkpoint_every` and `keep`",
        ("checkpoints_path",): "`output`, the run folder",
        ("learning_rate_scheduler", "lr_decay_style"): _SCHEDULE,
        ("lr_warmup_steps",): "`schedule.warmup`",
        ("min_decay_lr",): "`schedule.min_lr_ratio`, a fraction of the peak",
        ("clip_grad",): _CLIP,
        ("zero_stage", "accumulate_grad_in_fp32"): _SHARDING,
        ("optimizer_factory",): _OPTIMIZER,
        ("model_config",): "`model.config`, with `model.architecture`",
        (
            "init_method",
            "ddp_bucket_cap_mb",
            "make_vocab_size_divisible_by",
        ): "leave it out: transformers makes the model",
        ("logging", "profiler"): _TRACKER,
        ("lighteval", "s3_upload"): "not supported: checkpoints and the model stay in the run folder",
        ("recompute_layer", "recompute_granularity"): _RECOMPUTE,
    },
}


def _by_field() -> dict[str, str]:
    """Return what is written instead of a field, by its name; the first framework that has it decides."""
    sentences: dict[str, str] = {}
    for rows in FRAMEWORKS.values():
        for names, sentence in rows.items():
            for name in names:
                sentences.setdefault(name, sentence)
    return sentences


def _answer(sentence: str) -> str:
    use = "use " if sentence.startswith("`") else ""
    return f"{use}{sentence.replace('`', '')} (docs/coming_from.md)"


HERE = {name: _answer(sentence) for name, sentence in _by_field().items()}


def sections() -> str:
    """Return the part of docs/coming_from.md on other frameworks' config files, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "## Config files of other frameworks"
    yield ""
    yield "A config with one of these fields is refused with the text on the right. The tables are made from"
    yield "`hydragraph/train/coming_from.py`."
    for framework, rows in FRAMEWORKS.items():
        yield ""
        yield f"### {framework[0].upper() if framework.startswith('the ') else framework[0]}{framework[1:]}"
        yield ""
        yield "| there | here |"
        yield "|---|---|"
        for names, sentence in rows.items():
            there = ", ".join(f"`{name}`" for name in names)
            yield f"| {there} | {sentence} |"
