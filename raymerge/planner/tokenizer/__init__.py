"""The output's tokenizer, and the rows of its embeddings."""
