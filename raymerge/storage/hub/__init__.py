"""The Hugging Face Hub."""
