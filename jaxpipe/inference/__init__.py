"""Use of a trained model: scores of given tokens, and generation of new ones."""
