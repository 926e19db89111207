"""jaxpipe: pipeline-parallel training of decoder language models in JAX."""
