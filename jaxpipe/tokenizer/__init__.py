"""The files of a tokenizer, as Hugging Face's libraries write them."""
