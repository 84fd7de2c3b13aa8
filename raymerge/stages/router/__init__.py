"""Router rows of mixtures of experts, from prompts that the base model reads layer by layer."""
