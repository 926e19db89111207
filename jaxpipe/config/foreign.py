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
    ("pp_schedule pipeline_parallel_schedule pipeline_schedule", "`parallel.schedule`"),
    ("pipeline_parallel_schedule_csv", "`parallel.schedule_file`, with `parallel.schedule=custom`"),
    (
        "num_virtual_stages_per_rank virtual_pipeline_model_parallel_size num_model_chunks "
        "num_layers_per_virtual_pipeline_stage",
        "`parallel.virtual_stages`: stages per pipeline rank",
    ),
    (
        "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel_size "
        "pipeline_parallel pp_size pp_degree num_stages",
        "`parallel.pp`",
    ),
    (
        "pipeline_parallel_split_points split_points module_fqns_per_model_part "
        "pipeline_parallel_layers_per_stage pipeline_model_parallel_layout partition_method",
        "`parallel.layer_split`",
    ),
    (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches "
        "num_pp_microbatches num_microbatches n_microbatches microbatches",
        "`train.grad_accum_steps`",
    ),
    (
        "global_batch_size train_batch_size total_batch_size",
        "`train.batch_tokens`, in tokens, in place of `train.grad_accum_steps`",
    ),
    (
        "micro_batch_size pipeline_parallel_microbatch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu batch_size",
        "`train.microbatch_size`",
    ),
    (
        "local_batch_size",
        "`train.microbatch_size` x `train.grad_accum_steps`: sequences of a replica in a step",
    ),
    (
        "dp_shard data_parallel_size data_parallel_shard_degree fsdp_size dp_size dp_degree",
        "`parallel.dp`; with `parallel.dp_replicate` groups, the product of both",
    ),
    ("data_parallel_replicate_degree dp_replicate_size", "`parallel.dp_replicate`"),
    (
        "world_size num_gpus n_gpus num_devices nproc_per_node",
        "`parallel.pp` x `parallel.dp` x `parallel.tp`, and `runtime.cpu_devices`",
    ),
    (
        "data_parallel_sharding_strategy zero_optimization fsdp_sharding_strategy "
        "sharding_strategy use_distributed_optimizer zero fsdp",
        "`parallel.zero_stage`",
    ),
    ("fsdp_reshard_after_forward", "`parallel.reshard_after_forward`"),
    (
        "fsdp_cpu_offload cpu_offload optimizer_cpu_offload offload_optimizer",
        "`train.offload_moments`",
    ),
    (
        "sequence_length seq_length max_length cutoff_len max_seq_length context_length "
        "sequence_len block_size train/max_seq_len",
        "`train.seq_len`",
    ),
    (
        "max_steps train_iters num_train_steps total_steps training_steps train_steps "
        "num_steps max_iters num_iterations",
        "`train.steps`",
    ),
    (
        "epochs num_epochs num_train_epochs max_epochs train_samples train_tokens",
        "`train.steps`, of `train.batch_tokens` tokens each",
    ),
    ("random_seed", "`train.seed`"),
    (
        "mixed_precision_param mixed_precision torch_dtype precision dtype bf16 fp16",
        '`train.compute_dtype="bfloat16"`, `"float16"` or `"float32"`',
    ),
    ("mixed_precision_reduce grad_reduce_in_fp32", "`parallel.grad_reduce_dtype`"),
    ("max_position_embeddings n_positions n_ctx", "`model.max_seq_len`"),
    (
        "model/name model/flavor model_name_or_path model_type model_name architectures",
        "`model.preset`, `model.family`",
    ),
    (
        "hidden_act activation_function normalization swiglu",
        "`model.family`, which has one such function",
    ),
    ("hidden_size n_embd dim embed_dim emb_dim", "`model.d_model`"),
    ("num_hidden_layers num_layers n_layer layers", "`model.n_layers`"),
    ("num_attention_heads n_head num_heads heads", "`model.n_heads`"),
    ("num_key_value_heads num_query_groups num_kv_heads kv_heads", "`model.n_kv_heads`"),
    ("kv_channels d_head head_size", "`model.head_dim`"),
    ("intermediate_size ffn_hidden_size n_inner mlp_dim hidden_dim", "`model.d_ff`"),
    (
        "rms_norm_eps layer_norm_epsilon layer_norm_eps layernorm_epsilon norm_epsilon",
        "`model.norm_eps`",
    ),
    ("rotary_base rope_base rotary_emb_base", "`model.rope_theta`"),
    (
        "tie_word_embeddings share_embeddings_and_output_weights tied_embeddings "
        "enable_weight_tying",
        "`model.tie_embeddings`",
    ),
    ("untie_embeddings_and_output_weights", "`model.tie_embeddings`, of the opposite value"),
    ("attention_bias add_qkv_bias", "`model.qkv_bias`"),
    ("resid_pdrop embd_pdrop hidden_dropout", "`model.dropout`"),
    ("attn_pdrop", "`model.attention_dropout`"),
    ("attn_implementation use_flash_attn use_flash_attention", '`model.attention="cudnn"`'),
    (
        "data_path blend data_prefix dataset_path train_data_path train_file train_files "
        "data_files data_dir",
        "`data.sources`, or `data.path`",
    ),
    ("valid_data_path validation_file eval_dataset eval_dataset_path", "`data.heldout_path`"),
    ("split val_fraction validation_split", "`data.heldout_fraction`"),
    ("dataset dataset_name", "`data.source`, `data.path`"),
    (
        "tokenizer tokenizer_path tokenizer_model tokenizer_type tokenizer_name_or_path "
        "hf_assets_path chat_template",
        "`data.path`: tokens, which `data prepare --tokenizer DIR` writes",
    ),
    (
        "context_parallel_degree context_parallel_size sequence_data_parallel cp_size "
        "ulysses_degree ring_degree sequence_parallel_size",
        "`parallel.cp`",
    ),
    ("context_parallel_rotate_method cp_comm_type", "`parallel.cp_method`"),
    (
        "expert_parallel_degree expert_model_parallel_size expert_parallel ep_size ep_degree",
        "`parallel.ep`",
    ),
    (
        "expert_tensor_parallel_degree expert_tensor_parallel_size",
        "`parallel.ep_over_tp`; true: 1, false: tp",
    ),
    ("breadth_first_micro_batches microbatch_group_size_per_vp_stage", "`parallel.breadth`"),
    ("micro_batch_splits num_seq_splits", "`parallel.slices`"),
    (
        "tensor_parallel_degree tensor_model_parallel_size tensor_parallel_size "
        "tensor_parallel tp_size tp_degree",
        "`parallel.tp`",
    ),
    ("sequence_tensor_parallel", "`parallel.sequence_parallel`"),
    ("ce_chunk_size cross_entropy_splits", "`train.loss_chunks`"),
    (
        "skip_step_on_spikes skip_step_scaling_factor skip_step_interval",
        "`train.spike_sigma`, `train.spike_window`",
    ),
    (
        "num_layers_in_first_stage decoder_first_pipeline_num_layers",
        "`parallel.first_stage_layers`",
    ),
    ("num_layers_in_last_stage decoder_last_pipeline_num_layers", "`parallel.last_stage_layers`"),
    ("num_experts num_local_experts n_routed_experts", "`model.n_experts`"),
    ("num_experts_per_tok moe_router_topk top_k", "`model.experts_per_token`"),
    ("moe_intermediate_size moe_ffn_hidden_size", "`model.d_expert`"),
    ("n_shared_experts num_shared_experts", "`model.shared_experts`"),
    ("first_k_dense_replace decoder_sparse_step", "`model.first_dense_layers`, `model.moe_every`"),
    ("router_aux_loss_coef moe_aux_loss_coeff load_balance_coeff", "`model.router_aux_loss`"),
    ("moe_z_loss_coeff", "`model.router_z_loss`"),
    ("scoring_func score_func moe_router_score_function", "`model.router_score`"),
    ("routed_scaling_factor route_scale moe_router_topk_scaling_factor", "`model.router_scale`"),
    ("n_group moe_router_num_groups", "`model.expert_groups`"),
    ("topk_group moe_router_group_topk", "`model.groups_per_token`"),
    ("moe_expert_capacity_factor", "`model.capacity_factor`"),
    ("sliding_window_pattern global_attn_every_n_layers", "`model.global_every`"),
    ("fp8_recipe enable_fp8_linear", '`train.fp8="delayed"` or `"current"`'),
    (
        "activation_checkpointing gradient_checkpointing activation_checkpoint/mode "
        "recompute_granularity recompute_method recompute selective_ac_option",
        "`train.remat`",
    ),
    ("recompute_num_layers", "`train.remat_layers`"),
    ("sample_packing sample_packing_method", "`data.packing`"),
    ("sample_packing_sequence_len", "`train.seq_len`, with `data.packing`"),
    (
        "pp_variable_seq_lengths pp_seq_len_bucket_size",
        "`train.variable_length`, `train.length_bucket`",
    ),
    ("optimizer_name optim optimizer_type optimizer/type", "`optimizer.name`"),
    ("learning_rate peak_lr", "`optimizer.lr`"),
    ("adam_beta1 adam_beta2 betas", "`optimizer.beta1`, `optimizer.beta2`"),
    ("adam_epsilon adam_eps epsilon", "`optimizer.eps`"),
    ("adam_weight_decay wd", "`optimizer.weight_decay`"),
    (
        "max_norm max_grad_norm clip_grad grad_clip gradient_clipping gradient_clip_val",
        "`optimizer.clip_norm`",
    ),
    ("lr_scheduler_type lr_scheduler scheduler lr_decay_style decay_type", "`optimizer.decay`"),
    (
        "warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps warmup",
        "`optimizer.warmup_steps`",
    ),
    ("warmup_ratio lr_warmup_fraction", "`optimizer.warmup_steps`, in steps"),
    ("lr_decay_iters lr_decay_steps decay_steps", "`train.steps`, where `optimizer.decay` ends"),
    ("min_lr min_lr_factor end_lr", "`optimizer.min_lr_ratio`: the last rate over the peak"),
    ("decay_ratio", "`optimizer.wsd_decay_fraction`"),
    (
        "output_dir dump_folder save_dir checkpoint_dir ckpt_dir log_dir logging_dir "
        "checkpoint/folder",
        "`run.dir`",
    ),
    (
        "run_name exp_name experiment_name job_name run/name log/name",
        "`run.dir`, whose last part names the run",
    ),
    ("save_steps save_interval save_every save_freq checkpoint/interval", "`checkpoint.every`"),
    ("hf_save_interval", "`checkpoint.export_every`"),
    ("keep_latest_k save_total_limit", "`checkpoint.keep`"),
    ("async_mode async_save", "`checkpoint.asynchronous`"),
    (
        "resume_from_checkpoint initial_load_path load_path load_from pretrained_checkpoint "
        "checkpoint/load",
        "`checkpoint.resume`",
    ),
    ("initial_load_model_only finetune no_load_optim", "`checkpoint.parameters_only`"),
    ("log_freq log_interval logging_steps log_every log_steps log_every_n_steps", "`log.every`"),
    ("enable_tensorboard tensorboard_dir", "`log.tensorboard`"),
    ("enable_wandb use_wandb wandb_mode", "`log.wandb`"),
    ("report_to", "`log.wandb`, `log.tensorboard`"),
    ("profile_freq enable_profiling", "`log.profile_start`, `log.profile_steps`"),
    ("eval_interval eval_steps_interval val_check_interval", "`train.eval_every`"),
    ("eval_iters", "`train.eval_steps`"),
    ("lora_r lora_rank lora/r", "`lora.rank`"),
    ("lora_alpha", "`lora.alpha`"),
    ("lora_dropout", "`lora.dropout`"),
    ("target_modules lora_target_modules", "`lora.targets`"),
    (
        "init_timeout_seconds train_timeout_seconds distributed_timeout_minutes",
        "`runtime.hang_timeout`",
    ),
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
