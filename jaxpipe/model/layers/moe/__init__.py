"""Mixture of experts: sizes, router, load balancing, dispatch and grouped products."""
