"""DeepSeek-V2 and V3: multi-head latent attention and mixtures of experts."""
