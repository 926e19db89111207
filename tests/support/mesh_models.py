"""Small models of every family by name, as tests of meshes build them."""

from jaxpipe.model.families.bamba import BambaConfig
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.engram.config import EngramConfig
from jaxpipe.model.families.gemma3.config import Gemma3Config
from jaxpipe.model.families.glm4 import Glm4Config
from jaxpipe.model.families.glm4_moe import Glm4MoeConfig
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.gpt_oss.config import GptOssConfig
from jaxpipe.model.families.granite_hybrid.config import GraniteHybridConfig
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama4.config import Llama4Config
from jaxpipe.model.families.minimax_m2 import MiniMaxM2Config
from jaxpipe.model.families.nemotron_h.config import NemotronHConfig
from jaxpipe.model.families.olmo2 import Olmo2Config
from jaxpipe.model.families.olmo3 import Olmo3Config
from jaxpipe.model.families.olmo_hybrid.config import OlmoHybridConfig
from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig

SIZES = {"n_layers": 4, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 40}
# Of the kinds local, local, global, local, so two stages of two layers differ.
ALTERNATING = {"n_kv_heads": 2, "sliding_window": 3, "global_every": 3}
MIXTURE = {"n_experts": 4, "experts_per_token": 2}
GPT_OSS = SIZES | ALTERNATING | MIXTURE | {"rope_original_positions": 4}
# Chunks end within a row; of four layers two are sparse, and one has no positions.
LLAMA4 = SIZES | {
    "n_kv_heads": 2, "n_experts": 4, "moe_every": 2, "nope_every": 3, "attention_chunk": 3,
    "temperature_floor": 2, "rope_theta": 100.0,
}  # fmt: skip
# Of the kinds linear, attention, linear, attention; chunks end within a row and within slices.
HYBRID = SIZES | MIXTURE | {
    "n_kv_heads": 2, "head_dim": 8, "d_expert": 12, "attention_every": 2, "delta_key_heads": 4,
    "delta_value_heads": 8, "delta_key_dim": 6, "delta_value_dim": 5, "delta_taps": 3,
    "delta_chunk": 2,
}  # fmt: skip
# Of Mamba-2, whose chunks end within a row and within slices.
MAMBA = {
    "n_kv_heads": 2, "head_dim": 8, "mamba_heads": 8, "mamba_head_dim": 5, "mamba_groups": 4,
    "mamba_state": 6, "mamba_taps": 3, "mamba_chunk": 3,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_mscale": 1.0,
    "rope_mscale_all_dim": 1.0, "rope_original_positions": 16, "rope_theta": 100.0,
    "rope_beta_fast": 2.0, "rope_beta_slow": 0.5,
}  # fmt: skip
# Latent attention in the second and the last layer, and an MLP in the first.
KIMI = SIZES | MIXTURE | {
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "d_expert": 12, "router_bias": False, "attention_every": 2, "delta_heads": 4,
    "delta_head_dim": 6, "delta_taps": 3, "delta_chunk": 2,
}  # fmt: skip
# The second and third of four layers look up n-grams, many of which share a row.
NGRAMS = {
    "n_kv_heads": 2, "ngram_layers": (1, 2), "ngram_heads": 4, "ngram_rows": 13, "ngram_width": 3,
}  # fmt: skip
NEMOTRON = SIZES | MAMBA | MIXTURE | {"d_expert": 12, "shared_experts": 1}
INDEXED = LATENT | {"index_topk": 3, "index_n_heads": 8, "index_head_dim": 6}
# Layers of four kinds: all ways of attention, and the first with a table of experts.
ENTRIES = SIZES | MIXTURE | {
    "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 10,
    "sliding_window": 3, "attention_first": ("window",), "csa_rate": 2, "hca_rate": 4,
    "index_n_heads": 8, "index_head_dim": 6, "index_topk": 2, "hc_mult": 3, "num_hash_layers": 1,
    "rope_theta": 100.0, "compress_rope_theta": 150.0, "rope_factor": 4.0,
    "rope_original_positions": 16, "router_bias": False,
}  # fmt: skip
MODELS = {
    "grouped": LlamaConfig(**SIZES, n_kv_heads=2),
    "biased": LlamaConfig(**SIZES, n_kv_heads=2, qkv_bias=True),
    "normed": LlamaConfig(**SIZES, n_kv_heads=4, head_dim=16, qk_norm=True),
    "tied": LlamaConfig(**SIZES, n_kv_heads=2, tie_embeddings=True),
    "one_kv": LlamaConfig(**SIZES, n_kv_heads=1, qk_norm=True, tie_embeddings=True),
    "deep": LlamaConfig(**SIZES | {"n_layers": 8}, n_kv_heads=1, tie_embeddings=True),
    "windowed": LlamaConfig(**SIZES, n_kv_heads=2, sliding_window=3),
    "odd": LlamaConfig(**SIZES | {"d_model": 64, "d_ff": 80}, n_kv_heads=2),  # 3 divides nothing
    "gpt2": GPT2Config(**SIZES, max_seq_len=11),
    "gemma3": Gemma3Config(**SIZES, **ALTERNATING),
    "packed_gemma3": Gemma3Config(**SIZES, **ALTERNATING),
    "gpt_oss": GptOssConfig(**GPT_OSS),
    "packed_gpt_oss": GptOssConfig(**GPT_OSS),
    "fused_gpt_oss": GptOssConfig(**GPT_OSS, attention="cudnn"),
    "llama4": Llama4Config(**LLAMA4),
    "packed_llama4": Llama4Config(**LLAMA4),
    "olmo2": Olmo2Config(**SIZES, n_kv_heads=2),
    "packed_olmo3": Olmo3Config(**SIZES, **ALTERNATING),
    # An MLP, two sparse layers, and predictions of one further token with a sparse block.
    "packed_glm4_moe": Glm4MoeConfig(
        **SIZES | {"n_layers": 3},
        **MIXTURE,
        n_kv_heads=2,
        d_expert=12,
        router_bias=False,
        mtp_depth=1,
        mtp_weight=0.3,
    ),
    "minimax_m2": MiniMaxM2Config(**SIZES, n_kv_heads=2, **MIXTURE, router_bias=False),
    "qwen3_next": Qwen3NextConfig(**HYBRID),
    "packed_qwen3_next": Qwen3NextConfig(**HYBRID),
    "packed_qwen3_next_deep": Qwen3NextConfig(**HYBRID | {"n_layers": 8}),
    "kimi_linear": KimiLinearConfig(**KIMI),
    "packed_kimi_linear": KimiLinearConfig(**KIMI),
    "packed_kimi_linear_deep": KimiLinearConfig(**KIMI | {"n_layers": 8}),
    # Stages of three layers of a kind in a row, and one of another.
    "packed_qwen3_next_runs": Qwen3NextConfig(**HYBRID | {"n_layers": 8, "attention_every": 4}),
    "packed_qwen3_next_ahead": Qwen3NextConfig(**HYBRID | {"n_layers": 3}, mtp_depth=1),
    "packed_kimi_linear_runs": KimiLinearConfig(**KIMI | {"n_layers": 8, "attention_every": 4}),
    "nemotron_h": NemotronHConfig(**SIZES, **MAMBA, layer_pattern="M-M*"),
    "packed_olmo_hybrid": OlmoHybridConfig(
        **{name: size for name, size in HYBRID.items() if name not in {*MIXTURE, "d_expert"}}
    ),
    "bamba": BambaConfig(**SIZES, **MAMBA, layer_pattern="M*"),
    "packed_bamba": BambaConfig(**SIZES, **MAMBA | {"mamba_groups": 1}, layer_pattern="M*"),
    "packed_granite": GraniteHybridConfig(
        **SIZES,
        **MAMBA,
        **MIXTURE,
        d_expert=12,
        shared_experts=1,
        layer_pattern="M*",
        embedding_multiplier=3.0,
        attention_multiplier=0.7,
        residual_multiplier=0.4,
        logits_scaling=0.5,
    ),
    "engram": EngramConfig(**SIZES, **NGRAMS),
    "packed_engram": EngramConfig(**SIZES, **NGRAMS, **MIXTURE),
    "packed_engram_deep": EngramConfig(**SIZES | {"n_layers": 8}, **NGRAMS, **MIXTURE),
    "packed_nemotron_h": NemotronHConfig(**NEMOTRON, layer_pattern="MEM*"),
    "packed_nemotron_h_runs": NemotronHConfig(**NEMOTRON | {"n_layers": 8}, layer_pattern="MMEE"),
    "packed_nemotron_h_deep": NemotronHConfig(**NEMOTRON | {"n_layers": 8}, layer_pattern="MEM*"),
    "glm4": Glm4Config(**SIZES, n_kv_heads=1, qkv_bias=True),
    "dropping": LlamaConfig(**SIZES, n_kv_heads=2, dropout=0.3, attention_dropout=0.2),
    "gpt2_dropping": GPT2Config(**SIZES, max_seq_len=11, dropout=0.2, attention_dropout=0.3),
    "packed": LlamaConfig(**SIZES, n_kv_heads=2),
    "packed_deep": LlamaConfig(**SIZES | {"n_layers": 8}, n_kv_heads=2),
    "packed_windowed": LlamaConfig(**SIZES, n_kv_heads=2, sliding_window=3),
    "fused": LlamaConfig(**SIZES, n_kv_heads=2, attention="cudnn"),
    "packed_fused": LlamaConfig(**SIZES, n_kv_heads=2, attention="cudnn"),
    "packed_gpt2": GPT2Config(**SIZES, max_seq_len=11),
    "latent": DeepseekConfig(family="deepseek", **SIZES, **LATENT),
    "latent_fused": DeepseekConfig(family="deepseek", **SIZES, **LATENT, attention="cudnn"),
    "packed_latent": DeepseekConfig(family="deepseek", **SIZES, **LATENT | {"q_lora_rank": 0}),
    "indexed": DeepseekConfig(family="deepseek", **SIZES, **INDEXED, index_loss=0.5),
    "warming": DeepseekConfig(family="deepseek", **SIZES, **INDEXED, index_warmup=True),
    "packed_indexed": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 3}, **INDEXED, **MIXTURE, mtp_depth=1
    ),
    "packed_indexed_deep": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 7}, **INDEXED, **MIXTURE, mtp_depth=1
    ),
    # Pipeline layers of one, two, one and two blocks; then one that predicts a further token.
    "shared_index": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 7}, **INDEXED, index_group=2, index_first=1
    ),
    "shared_warming": DeepseekConfig(
        family="deepseek", **SIZES, **INDEXED, index_group=2, index_warmup=True
    ),
    "packed_shared_index": DeepseekConfig(
        family="deepseek",
        **SIZES | {"n_layers": 6},
        **INDEXED,
        **MIXTURE,
        mtp_depth=1,
        index_group=3,
        index_first=1,
        first_dense_layers=2,
    ),
    "ahead": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 3}, **LATENT, mtp_depth=1, mtp_weight=0.3
    ),
    "deeper": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 2}, **LATENT, mtp_depth=2, mtp_weight=0.3
    ),
    "packed_ahead": DeepseekConfig(
        family="deepseek",
        **SIZES | {"n_layers": 3, "vocab_size": 41},
        **LATENT,
        mtp_depth=2,
        tie_embeddings=True,
    ),
    # Latent attention and experts; the last of 4 or 8 pipeline layers predicts further tokens.
    "packed_mixture_ahead": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 3}, **LATENT, **MIXTURE, mtp_depth=1
    ),
    "packed_mixture_ahead_deep": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 7}, **LATENT, **MIXTURE, mtp_depth=1
    ),
    "packed_gpt_oss_deep": GptOssConfig(**GPT_OSS | {"n_layers": 8}),
    "packed_latent_fused": DeepseekConfig(
        family="deepseek", **SIZES, **LATENT, attention="cudnn", tie_embeddings=True
    ),
    "entries": DeepseekV4Config(**ENTRIES),
    # Windows, and entries with the tokens before them, are longer than a shard of two tokens.
    "packed_entries": DeepseekV4Config(**ENTRIES | {"hca_rate": 2, "sliding_window": 5}),
    "packed_entries_deep": DeepseekV4Config(
        **ENTRIES | {"n_layers": 8, "hca_rate": 2, "sliding_window": 5}
    ),
    "uneven": LlamaConfig(**SIZES | {"vocab_size": 41}, n_kv_heads=2),  # 2 and 4 do not divide it
    "uneven_tied": LlamaConfig(**SIZES | {"vocab_size": 33}, n_kv_heads=4, tie_embeddings=True),
    "uneven_gpt2": GPT2Config(**SIZES | {"vocab_size": 37}, max_seq_len=11),
}
