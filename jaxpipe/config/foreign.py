"""Names of other trainers' settings, and the settings here: hints in errors, and a page's table.

`ROWS` is the table "Coming from another trainer" of `jaxpipe/config/README.md`, which a test
compares with it.
"""

PAGE = '"Coming from another trainer" in jaxpipe/config/README.md'
SECTIONS = {  # sections of torchtitan, nanotron, Fast-LLM and others, and those with their settings
    "activation_checkpoint": "train",
    "batch": "train",
    "comm": "runtime",
    "compile": "runtime",
    "distributed": "parallel",
    "eval": "train",
    "experimental": "parallel",
    "general": "run",
    "job": "run",
    "lr_scheduler": "optimizer",
    "metrics": "log",
    "multi_stage": "parallel",
    "parallelism": "parallel",
    "profiling": "log",
    "schedule": "parallel",
    "scheduler": "optimizer",
    "tokens": "train",
    "trainer": "train",
    "training": "train",
    "validation": "train",
}
# Names at other trainers, in torchtitan's, Megatron's, Hugging Face's or DeepSpeed's spelling, and
# the settings here. `section/key` is that key of that section alone.
ROWS = (
    ("pp_schedule pipeline_parallel_schedule", "`parallel.schedule`"),
    ("pipeline_parallel_schedule_csv", "`parallel.schedule_file`, with `parallel.schedule=custom`"),
    (
        "num_virtual_stages_per_rank virtual_pipeline_model_parallel_size num_model_chunks",
        "`parallel.virtual_stages`: stages per pipeline rank",
    ),
    (
        "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel pp_size",
        "`parallel.pp`",
    ),
    ("gradient_accumulation_steps num_pp_microbatches", "`train.grad_accum_steps`"),
    (
        "global_batch_size train_batch_size",
        "`train.batch_tokens`, in tokens, in place of `train.grad_accum_steps`",
    ),
    (
        "micro_batch_size pipeline_parallel_microbatch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu",
        "`train.microbatch_size`",
    ),
    (
        "local_batch_size",
        "`train.microbatch_size` x `train.grad_accum_steps`: sequences of a replica in a step",
    ),
    (
        "dp_shard data_parallel_size data_parallel_shard_degree fsdp_size",
        "`parallel.dp`; with `parallel.dp_replicate` groups, the product of both",
    ),
    ("data_parallel_replicate_degree", "`parallel.dp_replicate`"),
    (
        "data_parallel_sharding_strategy zero_optimization fsdp_sharding_strategy",
        "`parallel.zero_stage`",
    ),
    ("fsdp_reshard_after_forward", "`parallel.reshard_after_forward`"),
    ("sequence_length seq_length max_length cutoff_len", "`train.seq_len`"),
    (
        "max_steps train_iters num_train_steps total_steps training_steps train_steps",
        "`train.steps`",
    ),
    ("random_seed", "`train.seed`"),
    (
        "mixed_precision_param torch_dtype bf16 fp16",
        '`train.compute_dtype="bfloat16"`, `"float16"` or `"float32"`',
    ),
    ("mixed_precision_reduce grad_reduce_in_fp32", "`parallel.grad_reduce_dtype`"),
    ("max_position_embeddings n_positions", "`model.max_seq_len`"),
    ("model/name model/flavor model_name_or_path model_type", "`model.preset`, `model.family`"),
    ("hidden_size n_embd dim embed_dim", "`model.d_model`"),
    ("num_hidden_layers num_layers n_layer", "`model.n_layers`"),
    ("num_attention_heads n_head", "`model.n_heads`"),
    ("num_key_value_heads num_query_groups", "`model.n_kv_heads`"),
    ("intermediate_size ffn_hidden_size n_inner", "`model.d_ff`"),
    ("rms_norm_eps layer_norm_epsilon norm_epsilon", "`model.norm_eps`"),
    ("rotary_base", "`model.rope_theta`"),
    ("tie_word_embeddings", "`model.tie_embeddings`"),
    ("attn_implementation use_flash_attn use_flash_attention", '`model.attention="cudnn"`'),
    ("data_path blend data_prefix dataset_path", "`data.sources`, or `data.path`"),
    ("dataset dataset_name", "`data.source`, `data.path`"),
    (
        "context_parallel_degree context_parallel_size sequence_data_parallel cp_size",
        "`parallel.cp`",
    ),
    (
        "expert_parallel_degree expert_model_parallel_size expert_parallel ep_size",
        "`parallel.ep`",
    ),
    (
        "breadth_first_micro_batches microbatch_group_size_per_vp_stage",
        "`parallel.breadth`",
    ),
    ("micro_batch_splits num_seq_splits", "`parallel.slices`"),
    (
        "tensor_parallel_degree tensor_model_parallel_size tensor_parallel tp_size",
        "`parallel.tp`",
    ),
    ("sequence_tensor_parallel", "`parallel.sequence_parallel`"),
    ("ce_chunk_size cross_entropy_splits", "`train.loss_chunks`"),
    (
        "skip_step_on_spikes skip_step_scaling_factor skip_step_interval",
        "`train.spike_sigma`, `train.spike_window`",
    ),
    (
        "num_layers_in_first_stage num_layers_in_last_stage decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers",
        "`parallel.first_stage_layers`, `parallel.last_stage_layers`",
    ),
    ("num_experts num_local_experts n_routed_experts", "`model.n_experts`"),
    ("num_experts_per_tok moe_router_topk", "`model.experts_per_token`"),
    ("moe_intermediate_size moe_ffn_hidden_size", "`model.d_expert`"),
    ("first_k_dense_replace decoder_sparse_step", "`model.first_dense_layers`, `model.moe_every`"),
    ("sliding_window_pattern global_attn_every_n_layers", "`model.global_every`"),
    ("fp8_recipe enable_fp8_linear", '`train.fp8="delayed"` or `"current"`'),
    (
        "activation_checkpointing gradient_checkpointing activation_checkpoint/mode "
        "recompute_granularity",
        "`train.remat`",
    ),
    ("sample_packing sample_packing_method", "`data.packing`"),
    ("sample_packing_sequence_len", "`train.seq_len`, with `data.packing`"),
    (
        "pp_variable_seq_lengths pp_seq_len_bucket_size",
        "`train.variable_length`, `train.length_bucket`",
    ),
    ("optimizer_name optim", "`optimizer.name`"),
    ("learning_rate peak_lr", "`optimizer.lr`"),
    ("adam_beta1 adam_beta2", "`optimizer.beta1`, `optimizer.beta2`"),
    ("max_norm max_grad_norm clip_grad gradient_clipping", "`optimizer.clip_norm`"),
    ("lr_scheduler_type lr_decay_style decay_type", "`optimizer.decay`"),
    ("warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps", "`optimizer.warmup_steps`"),
    ("min_lr min_lr_factor", "`optimizer.min_lr_ratio`: the last rate over the peak"),
    ("decay_ratio", "`optimizer.wsd_decay_fraction`"),
    ("output_dir dump_folder save_dir checkpoint_dir", "`run.dir`"),
    ("save_steps save_interval checkpoint/interval", "`checkpoint.every`"),
    ("keep_latest_k save_total_limit", "`checkpoint.keep`"),
    ("async_mode async_save", "`checkpoint.asynchronous`"),
    (
        "resume_from_checkpoint initial_load_path load_path pretrained_checkpoint",
        "`checkpoint.resume`",
    ),
    ("initial_load_model_only", "`checkpoint.parameters_only`"),
    ("log_freq log_interval logging_steps", "`log.every`"),
    ("enable_tensorboard tensorboard_dir", "`log.tensorboard`"),
    ("enable_wandb wandb_mode", "`log.wandb`"),
    ("profile_freq enable_profiling", "`log.profile_start`, `log.profile_steps`"),
    ("eval_interval eval_steps_interval", "`train.eval_every`"),
    ("lora_r lora_rank", "`lora.rank`"),
    ("lora_alpha lora_dropout", "`lora.alpha`, `lora.dropout`"),
    ("target_modules lora_target_modules", "`lora.targets`"),
)
_HERE = {name: here for names, here in ROWS for name in names.split()}


def meaning(section: str, key: str) -> str | None:
    """What another trainer's key is here, in the words of the table; None if it has none.

    >>> meaning("train", "global_batch_size")
    'train.batch_tokens, in tokens, in place of train.grad_accum_steps'
    """
    key = key.replace("-", "_")
    found = _HERE.get(f"{section}/{key}") or _HERE.get(key)
    return found and found.replace("`", "")


def table() -> str:
    """The table of the page, in Markdown."""
    lines = ["| there | here |", "|---|---|"]
    for names, here in ROWS:
        there = ", ".join(map(_in_table, names.split()))
        lines.append(f"| {there} | {here} |")
    return "\n".join(lines) + "\n"


def _in_table(name: str) -> str:
    section, _, key = name.rpartition("/")
    return f"`{key}` of `[{section}]`" if section else f"`{key}`"
