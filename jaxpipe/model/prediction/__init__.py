"""Multi-token prediction: a last layer that trains the stream to predict further tokens."""
