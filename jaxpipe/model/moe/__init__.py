"""Mixtures of experts: sizes, router, dispatch, the experts' products, and what keeps them even."""
